"""Sources that change after their store was encoded: only what changed is encoded, and copied files do not count as
changed."""

import gzip
import json
import os
import shutil

import pytest
from commands import DIGITS, SINGLE, in_process, with_set
from safetensors.torch import load_file
from tiny_sources import gradient, png, save, write_tar

from bigdit.loader.stages import plan_order
from bigdit.store import FeatureStore
from bigdit.store.schema import read_schema


def encode(images, features, options=()):
    settings = [f"data.images={json.dumps(images)}", f"data.features={features}", "data.workers=1", "data.part_size=2"]
    return in_process("extract", "--config", DIGITS, *with_set([*settings, "data.buckets=[[8,8]]"]), *options)


def changed(images, features, options=()):
    """What an extraction logs about changes, as bare text; it has finished."""
    done = encode(images, features, options)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stderr.splitlines() if " changed: " in line]
    assert all(line.endswith("; only changes are encoded") for line in found)
    return [line.removesuffix("; only changes are encoded") for line in found]


def trained_on(features):
    """The captions of an epoch over the store, each sample once."""
    store = FeatureStore.open(features)
    order, _ = plan_order(store, 1, 0, None, 0, features)
    found = []
    for step in range(order.batches_before(1)):
        batch = order.batch(step)
        part, row = store.part(int(batch.parts[0])), int(batch.rows[0])
        index = int(part.rows[order._shapes[batch.bucket]][row, 0])
        captions = json.loads(load_file(part.header.path)["captions"].numpy().tobytes())
        found.append(captions[str(index)][0][0])
    return sorted(found)


def parts(features):
    return {file.name: file.stat().st_mtime_ns for file in features.glob("part-*")}


@pytest.fixture
def folder(tmp_path):
    """A folder with images a to e in BMP, whose size follows from their sides. d has no caption."""
    for number, name in enumerate("abcde"):
        image = gradient(8, 8).point(lambda value, add=number: value // 2 + 9 * add)
        save(tmp_path / f"images/{name}.bmp", None if name == "d" else f"caption {name}", image)
    return tmp_path / "images"


def again(folder):
    """Give all files other times, as a copy does."""
    for number, file in enumerate(sorted(folder.rglob("*"))):
        os.utime(file, ns=(10**18 + number, 10**18 + number))


def test_only_what_was_added_or_edited_is_encoded_and_what_was_removed_is_no_longer_trained_on(folder, tmp_path):
    features, images = tmp_path / "f", str(folder)
    assert encode(images, features).returncode == 0
    before = parts(features)

    for name in "wxyz":
        save(folder / f"{name}.png", f"caption {name}")
    save(folder / "d.bmp", "caption d", gradient(8, 8))
    (folder / "a.txt").write_text("caption A")
    (folder / "b.bmp").unlink()
    (folder / "e.bmp").rename(folder / "0.bmp")  # the same image and caption by another name are not encoded again
    (folder / "e.txt").rename(folder / "0.txt")
    assert changed(images, features) == [
        "data.images[0] changed: 4 added: w.png, x.png, y.png, …; 1 removed: b.bmp; "
        "2 edited: the caption of a.bmp, d.bmp"
    ]
    assert before.items() < parts(features).items()
    assert read_schema(features).count == 5 + 6
    now = ["caption A", *(f"caption {name}" for name in "cdewxyz")]
    assert trained_on(features) == now

    info = json.loads(in_process("features", "info", features, "--json").stdout)
    assert [info[key] for key in ("images", "encoded", "gone", "captions", "skipped")] == [8, 8, 3, 8, []]
    done = encode(images, features)
    assert ("nothing was left to do" in done.stdout, "compare" in done.stderr) == (True, False)

    (tmp_path / "more").mkdir()
    save(tmp_path / "more/m.png", "caption m")
    (folder / "a.txt").write_text("caption a")  # as it once was
    assert changed([images, str(tmp_path / "more")], features) == [
        "data.images[0] changed: 1 edited: the caption of a.bmp"
    ]
    assert trained_on(features) == sorted([*now[1:], "caption a", "caption m"])
    done = encode(images, features)
    assert (done.returncode, "it has 2 sources, and data.images of this run has 1" in done.stderr) == (1, True)


def test_a_store_is_as_it_was_until_its_growth_is_complete(folder, tmp_path):
    features, images = tmp_path / "f", str(folder)
    assert encode(images, features).returncode == 0
    before = trained_on(features)
    for name in "xyz":
        save(folder / f"{name}.png", f"caption {name}")
    (folder / "a.txt").write_text("caption A")
    assert changed(images, features, ["--end-index", "7"])  # like one that is killed after its first part
    assert len(parts(features)) == 4
    assert trained_on(features) == before
    assert "are only partly encoded, and not used yet" in in_process("features", "info", features).stdout
    assert changed(images, features) == []  # it resumes
    assert trained_on(features) == sorted([*before[1:], "caption A", "caption x", "caption y", "caption z"])

    # An unfinished growth meets more changes, in what it has encoded and in what it has not.
    (folder / "y.txt").write_text("caption Y")
    (folder / "z.txt").write_text("caption Z")
    for name in "uv":
        save(folder / f"{name}.png", f"caption {name}")
    assert changed(images, features, ["--end-index", "11"])
    assert len(parts(features)) == 6
    for name in "vyz":
        (folder / f"{name}.txt").write_text(f"caption-{name}")
    (folder / "u.png").unlink()
    before = trained_on(features)
    assert "caption y" in before
    assert changed(images, features)
    now = sorted([*before[:4], "caption x", "caption-v", "caption-y", "caption-z"])
    assert trained_on(features) == now

    (features / "schema.json").unlink()
    assert changed(images, features) == []
    assert trained_on(features) == now


def test_edits_that_keep_the_size_are_noticed_and_copies_are_not_taken_for_edits(folder, tmp_path):
    features = tmp_path / "f"
    assert encode(str(folder), features).returncode == 0
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    again(copy)
    done = encode(str(copy), features)
    assert (done.returncode, "nothing was left to do" in done.stdout) == (0, True), done.stderr
    assert "compare" in done.stderr
    assert "compare" not in encode(str(copy), features).stderr  # its times are known now

    dry = [
        "train",
        "--dry-run",
        "--config",
        DIGITS,
        *with_set([*SINGLE, f"data.images={copy}", f"data.features={features}"]),
    ]
    dry += with_set(["data.buckets=[[8,8]]", "strategy.global_batch_size=32", f"output={tmp_path / 'run'}"])
    line = (
        f"note: data.images[0] changed since it was encoded into {features}; `bigdit extract --config RUN.yaml` encodes"
    )
    assert line not in in_process(*dry).stderr
    columns = [
        f"data.images={{path: {copy}, captions: text}}" if each == f"data.images={copy}" else each for each in dry
    ]
    done = in_process(*columns)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: data.images: {copy} is a folder without metadata.jsonl, .csv or .parquet, so it has no columns; "
        "leave out image and captions\n",
    )
    (copy / "a.txt").write_text("caption A")
    done = in_process(*dry)
    assert (done.returncode, line in done.stderr) == (0, True), done.stderr
    assert changed(str(copy), features) == ["data.images[0] changed: 1 edited: the caption of a.bmp"]

    times = (copy / "b.txt").stat()
    (copy / "b.txt").write_text("caption B")
    os.utime(copy / "b.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert changed(str(copy), features) == []
    assert changed(str(copy), features, ["--by-content"]) == ["data.images[0] changed: 1 edited: the caption of b.bmp"]

    gradient(8, 8).rotate(90).save(copy / "c.bmp")
    (listing,) = (features / "index").glob("source-0*")
    listing.write_bytes(b"damaged")  # a copy of what is known
    assert changed(str(copy), features) == [
        "data.images[0] changed: 1 added: c.bmp; 1 removed: an image that is not listed"
    ]
    (listing,) = (features / "index").glob("source-0*")
    listing.write_bytes(gzip.compress(b'["b.bmp", "1", 2, [], null]\n' + b"[" * 10**5))
    assert changed(str(copy), features) == []
    assert "caption B" in trained_on(features)


def test_a_dry_run_names_what_training_would_not_see(folder, tmp_path):
    features, images = tmp_path / "f", str(folder)
    encode(images, features)

    def notes(*sources):
        settings = [f"data.images={json.dumps(sources)}", f"data.features={features}", "data.buckets=[[8,8]]"]
        settings += ["strategy.global_batch_size=32", f"output={tmp_path / 'run'}"]
        done = in_process("train", "--dry-run", "--config", DIGITS, *with_set([*SINGLE, *settings]))
        assert done.returncode == 0, done.stderr
        return [line for line in done.stderr.splitlines() if "data.images" in line]

    extract = "`bigdit extract --config RUN.yaml`"
    assert notes(images) == notes({"path": images, "repeats": 3}) == []
    assert notes(images, {"path": images, "caption": "a dog"}) == [
        f"note: data.images[1] is not encoded into {features}; {extract} adds it"
    ]
    for other in ({"mask": "alpha"}, {"tags": {"variants": 2}}, {"buckets": [[8, 8]]}):
        assert notes({"path": images} | other) == [
            f"note: data.images[0] had other settings when it was encoded into {features}; set them back, or set "
            "another data.features and extract again"
        ]
        assert encode({"path": images} | other, features).returncode == 1
    for name in "xyz":
        save(folder / f"{name}.png", f"caption {name}")
    changed(images, features, ["--end-index", "6"])  # like one that is killed
    assert notes(images) == [
        f"note: the last changes of data.images are not all encoded into {features}; {extract} finishes it"
    ]
    encode([images, images], features)
    assert notes(images) == [f"note: {features} has 2 sources, and data.images 1; training takes all of {features}"]


def test_the_report_names_skipped_images_as_they_are_called_now(folder, tmp_path):
    """d has no caption, and c is cut; both are renamed, and so is a, which is not encoded again."""
    features, images = tmp_path / "f", str(folder)
    os.truncate(folder / "c.bmp", 99)
    assert encode(images, features).returncode == 0
    for old, new in (
        ("a.bmp", "0.bmp"),
        ("a.txt", "0.txt"),
        ("c.bmp", "y.bmp"),
        ("c.txt", "y.txt"),
        ("d.bmp", "z.bmp"),
    ):
        (folder / old).rename(folder / new)
    assert changed(images, features) == ["data.images[0] changed: 2 added: y.bmp, z.bmp; 2 removed: c.bmp, d.bmp"]
    report = json.loads((features / "report.json").read_text())
    assert [item["name"] for item in report["skipped"]] == ["y.bmp", "z.bmp"]
    assert report["skipped"][1]["reason"] == "caption z.txt is missing"
    (folder / "z.txt").write_text("caption z")
    assert changed(images, features) == ["data.images[0] changed: 1 edited: z.bmp"]
    assert trained_on(features) == ["caption a", "caption b", "caption e", "caption z"]


def test_crops_and_mirror_images_that_a_source_gets_later_are_encoded(tmp_path):
    for at in range(2):
        save(tmp_path / f"images/{at}.png", f"caption {at}", gradient(24, 8).point(lambda value, at=at: value + at))

    def latents(source, features):
        assert encode(source, features).returncode == 0
        store, found = FeatureStore.open(features), []
        order, _ = plan_order(store, 1, 0, None, 0, features)
        for step in range(order.batches_before(1)):
            batch = order.batch(step)
            part, row = store.part(int(batch.parts[0])), int(batch.rows[0])
            (name,) = (each for each in load_file(part.header.path) if each.startswith("latent/"))
            found.append(load_file(part.header.path)[name][row].float().numpy().tobytes())
        return sorted(found)

    plain = {"path": str(tmp_path / "images")}
    for number, how in enumerate([{}, {"crops": 3}, {"crops": 2, "flip": True}, {"flip": True}, {}]):
        found = latents(plain | how, tmp_path / "grown")
        assert found == latents(plain | how, tmp_path / f"fresh-{number}"), how
        assert len({*found}) == 2 * how.get("crops", 1) * (1 + how.get("flip", False))
    assert encode(plain | {"flip": True}, tmp_path / "fewer").returncode == 0
    fewer = ["data.images[0] changed: 2 removed: parts of 0.png, parts of 1.png"]
    assert changed(plain, tmp_path / "fewer") == fewer


def test_parts_that_are_not_encoded_yet_take_what_there_is(folder, tmp_path):
    assert encode(str(folder), tmp_path / "f", options=["--end-index", "2"]).returncode == 0
    (folder / "c.bmp").unlink()
    (folder / "e.txt").write_text("caption E, longer")
    save(folder / "f.png", "caption f")
    assert changed(str(folder), tmp_path / "f") == ["data.images[0] changed: 1 added: f.png; 1 removed: c.bmp"]
    assert trained_on(tmp_path / "f") == ["caption E, longer", "caption a", "caption b", "caption f"]


def test_an_edit_within_a_tar_or_a_table_is_found_by_its_content(tmp_path):
    """A tar whose members keep their sizes, and a table. Another time alone changes nothing."""
    members = [("a.png", png(3)), ("a.txt", b"three"), ("b.png", png(4)), ("b.txt", b"four")]
    tar, features = tmp_path / "tars/0.tar", tmp_path / "f"
    write_tar(tar, members)
    save(tmp_path / "x.png")
    save(tmp_path / "y.png", None, gradient(8, 8).rotate(90))
    table = tmp_path / "list.csv"
    table.write_text("image,caption\nx.png,one\ny.png,two\n")
    assert encode([str(tar), str(table)], features).returncode == 0
    write_tar(tar, members)
    os.utime(tar, ns=(10**18, 10**18))
    assert changed([str(tar), str(table)], features) == []
    write_tar(tar, [*members[:3], ("b.txt", b"FOUR")])
    table.write_text("image,caption\ny.png,two\nx.png,ONE\nx.png,again\n")
    assert changed([str(tar), str(table)], features) == [
        "data.images[0] changed: 1 edited: the caption of 0.tar/b",
        "data.images[1] changed: 1 added: x.png; 1 edited: the caption of x.png",
    ]
    assert trained_on(features) == ["FOUR", "ONE", "again", "three", "two"]
