"""Sources that change after their store was encoded: what changed is named, and what was merely copied goes on."""

import gzip
import json
import os
import shutil

import pytest
from commands import DIGITS, bigdit, with_set
from tiny_sources import gradient, png, save, write_tar


def encode(images, features, options=()):
    settings = [f"data.images={json.dumps(images)}", f"data.features={features}", "data.workers=1", "data.part_size=2"]
    return bigdit("extract", "--config", DIGITS, *with_set([*settings, "data.buckets=[[8,8]]"]), *options)


def refused(images, features):
    """The one line that names what changed; it has no digests."""
    done = encode(images, features)
    assert done.returncode == 1, done.stderr
    line = done.stderr.splitlines()[-1]  # after the progress of reading them
    assert "digest" not in line
    return line


@pytest.fixture
def folder(tmp_path):
    """Images a to e in BMP, whose size follows from their sides; d has no caption."""
    for number, name in enumerate("abcde"):
        image = gradient(8, 8).point(lambda value, add=number: value // 2 + 9 * add)
        save(tmp_path / f"images/{name}.bmp", None if name == "d" else f"caption {name}", image)
    return tmp_path / "images"


def again(folder):
    """Other times for all files, as a copy has."""
    for number, file in enumerate(sorted(folder.rglob("*"))):
        os.utime(file, ns=(10**18 + number, 10**18 + number))


def test_what_was_added_removed_or_edited_in_a_folder_is_named_with_a_way_out(folder, tmp_path):
    features = tmp_path / "f"
    assert encode(str(folder), features).returncode == 0
    before = {file.name: file.stat().st_mtime_ns for file in features.glob("part-*")}
    again = (
        f"to encode all again, set another data.features, or delete {features}; then `bigdit extract --config RUN.yaml`"
    )
    begin = f"error: data.features: {features} was encoded before data.images[0] changed: "

    for name in "wxyz":
        save(folder / f"{name}.png")
    alone = "to encode only these, move them to a folder of their own, and append it to data.images; "
    assert refused(str(folder), features) == f"{begin}4 added: w.png, x.png, y.png, …; {alone}{again}"
    (tmp_path / "more").mkdir()
    for file in [file for name in "wxyz" for file in folder.glob(f"{name}.*")]:
        file.rename(tmp_path / "more" / file.name)
    assert encode([str(folder), str(tmp_path / "more")], features).returncode == 0  # the way out
    assert before.items() <= {file.name: file.stat().st_mtime_ns for file in features.glob("part-*")}.items()

    images = [str(folder), str(tmp_path / "more")]
    (folder / "a.txt").write_text("caption, longer")
    (tmp_path / "more/x.png").unlink()
    done = encode(images, features)
    assert done.stderr.splitlines() == [
        f"{begin}1 edited: the caption of a.bmp; {again}",
        f"{begin.replace('[0]', '[1]')}1 removed: x.png; {again}",
    ]


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

    listing = features / "index/source-0.jsonl.gz"  # a copy of what can be found out
    (copy / "b.txt").write_text("caption B")
    listing.write_bytes(b"damaged")
    assert "1 edited: the caption of b.bmp; to encode all again" in refused(str(copy), features)
    gradient(8, 8).rotate(90).save(copy / "c.bmp")
    listing.write_bytes(gzip.compress(b'["b.bmp", "1", 2, [], null]\n' + b"[" * 10**5))
    assert "2 edited: the caption of b.bmp, c.bmp; " in refused(str(copy), features)


def test_parts_that_are_not_encoded_yet_take_what_there_is(folder, tmp_path):
    assert encode(str(folder), tmp_path / "f", options=["--end-index", "2"]).returncode == 0
    (folder / "e.txt").write_text("caption E")
    done = encode(str(folder), tmp_path / "f")
    assert (done.returncode, "4 of 5 images encoded" in done.stdout) == (0, True), done.stderr


def test_an_edit_within_a_tar_that_keeps_all_sizes_is_noticed(tmp_path):
    """A tar whose members are as large as before, and which another time alone does not change."""
    tar, members = (
        tmp_path / "tars/0.tar",
        [("a.png", png(3)), ("a.txt", b"three"), ("b.png", png(4)), ("b.txt", b"four")],
    )
    write_tar(tar, members)
    features = tmp_path / "f"
    assert encode(str(tar), features).returncode == 0
    write_tar(tar, members)
    os.utime(tar, ns=(10**18, 10**18))
    assert encode(str(tar), features).returncode == 0
    write_tar(tar, [*members[:3], ("b.txt", b"FOUR")])
    assert "1 edited: the caption of 0.tar/b; " in refused(str(tar), features)
