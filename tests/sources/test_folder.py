"""A folder of images and captions: what is listed, which links are followed, and what cannot be used."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_sources import gradient, opened, reason, save

from bigdit.errors import UserError
from bigdit.sources.folder import Names
from bigdit.sources.protocol import Caption, Unusable


def test_a_folder_is_listed_in_the_order_of_paths(tmp_path):
    names = ("b/2.PNG", "a.jpg", "b/1.webp", "c.bmp", "notes.md", "b-1/x.png", "b.png", "b/d/e.tif")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    source = opened(str(tmp_path))
    images = sorted(set(names) - {"notes.md"})
    assert len(source) == len(images)
    assert [item.name for item in source.items(0, 99)] == images
    assert [(item.index, item.name) for item in source.items(2, 4)] == list(enumerate(images))[2:4]


def test_what_a_folder_holds_besides_is_reported(tmp_path, capsys):
    save(tmp_path / "a.png")
    (tmp_path / "b.heic").touch()
    (tmp_path / "c.heic").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    save(tmp_path / ".ipynb_checkpoints/a-checkpoint.png")
    for name in (".DS_Store", "._a.png"):
        (tmp_path / name).touch()
    assert len(opened(str(tmp_path))) == 1
    kinds = "3 hidden files, 2 .heic files, 1 linked folder"
    reported = f"data.images: other files in {tmp_path} are ignored: {kinds}; convert images to PNG or JPEG\n"
    assert capsys.readouterr().err == reported


def test_numbers_that_kohyas_scripts_repeat_by_are_named(tmp_path, capsys):
    save(tmp_path / "10_sks dog/a.png")
    save(tmp_path / "1_dog/a.png")
    opened(str(tmp_path))
    source = f"{{path: {tmp_path}/10_sks dog, repeats: 10}}"
    said = f"data.images: the numbers before the names of 1 folder repeat no image; for that, list them as {source}\n"
    assert capsys.readouterr().err == said
    opened([{"path": str(tmp_path / "10_sks dog"), "repeats": 10}])
    opened([{"path": str(tmp_path), "label": "folder"}])
    assert capsys.readouterr().err == ""


FILE_NAMES = st.binary(min_size=1, max_size=9).map(lambda name: os.fsdecode(name.translate(None, b"\0/") or b"x"))


@given(st.lists(FILE_NAMES, max_size=40))
def test_names_are_kept_as_they_are(names):
    kept = Names(names * 60)  # several blocks
    assert len(kept) == 60 * len(names)
    start, end = len(kept) // 3, len(kept) // 2
    assert list(kept.range(start, end)) == (names * 60)[start:end]
    assert list(kept.range(0, len(kept) + 5)) == names * 60


def test_the_identity_of_a_folder_follows_its_files_and_not_its_place(tmp_path):
    root = tmp_path / "first"
    save(root / "a.png", None)
    seen = [opened(str(root)).identity["digest"]]
    (root / "a.txt").write_text("a caption")
    seen.append(opened(str(root)).identity["digest"])
    (root / "a.json").write_text('"a caption"')
    seen.append(opened(str(root)).identity["digest"])
    for name in ("png", "txt", "json"):
        (root / f"a.{name}").rename(root / f"b.{name}")
    seen.append(opened(str(root)).identity["digest"])
    assert len(set(seen)) == 4
    root.rename(tmp_path / "second")
    assert opened(str(tmp_path / "second")).identity["digest"] == seen[-1]


def test_links_that_lead_out_of_a_folder_are_read_on_demand_alone(tmp_path):
    root = tmp_path / "source"
    save(root / "a.png")
    save(root / "deep/own.png")
    save(tmp_path / "outside/x.png", "a secret")
    for name, target in {
        "b.png": root / "a.png",  # within, by any path
        "b.txt": "a.txt",
        "deep/c.png": "../a.png",
        "deep/c.txt": "../../source/a.txt",
        "d.png": "../outside/x.png",
        "d.txt": "a.txt",
        "e.png": "a.png",
        "e.txt": "../outside/x.txt",
        "f.png": "a.png",
        "f.json": tmp_path / "outside/nothing",
    }.items():
        (root / name).symlink_to(target)

    def read(**options):
        found = {}
        source = opened({"path": str(root), **options})
        for item in source.items(0, 99):
            try:
                found[item.name] = item.load().captions[0].text
            except Unusable as error:
                found[item.name] = str(error)
        return found, source.identity["digest"]

    kept, digest = read()
    out = "is a link out of its folder; set follow_links of the source to read it"
    assert kept == {
        "a.png": "a caption",
        "b.png": "a caption",
        "d.png": f"d.png {out}",
        "deep/c.png": "a caption",
        "deep/own.png": "a caption",
        "e.png": f"e.txt {out}",
        "f.png": f"f.json {out}",
    }
    followed, another = read(follow_links=True)
    assert followed == kept | {"d.png": "a caption", "e.png": "a secret", "f.png": "caption f.txt is missing"}
    assert another != digest  # the features would differ
    (tmp_path / "linked").symlink_to(root)
    assert opened(str(tmp_path / "linked")).items(1, 2)[0].load().captions[0].text == "a caption"
    (tmp_path / "a.csv").write_text("path,caption\na.png,a\n")
    with pytest.raises(UserError, match=r"data\.images\.follow_links: .*a\.csv is of kind csv; it is for folders of"):
        opened({"path": str(tmp_path / "a.csv"), "follow_links": True})


def test_a_missing_and_an_empty_folder_are_errors(tmp_path):
    with pytest.raises(UserError, match=r"data\.images: the folder .*nowhere does not exist"):
        opened(str(tmp_path / "nowhere"))
    (tmp_path / "a.txt").write_text("a caption")
    with pytest.raises(UserError, match=r"data\.images: .* holds no images \(\.png, \.jpg"):
        opened(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("pics ", "the folder pics  does not exist; pics does"),
        (".\\pics", "the folder .\\pics does not exist; pics does"),
        ("picks", "the folder picks does not exist in {here}; did you mean pics?"),
        ("pics/a.csv", "the file pics/a.csv does not exist in {here}"),
        ("C:\\me\\pics", "the folder C:\\me\\pics does not exist: it is a path of Windows, whose C: is /mnt/c in WSL"),
        ("$SET/pics", "the folder $SET/pics does not exist: $ stands for no variable here; write {here}/pics"),
        ("${UNSET}/pics", "the folder ${{UNSET}}/pics does not exist: $ stands for no variable here; write the path"),
        ("pics/*.png", "the folder pics/*.png does not exist: patterns are for .tar files alone; name the folder pics"),
        ("'pics'", "the folder 'pics' does not exist; pics does"),
        ("{here}/picks", "the folder {here}/picks does not exist; did you mean {here}/pics?"),
        ("~/pics", "the folder ~/pics does not exist: ~ stands for no folder here; write {home}/pics"),
        (
            "lambda/cats",
            "the folder lambda/cats does not exist; if it is a data set of Hugging Face, run `hf download ",
        ),
    ],
)
def test_a_wrong_path_is_answered_with_the_nearest_that_is_there(tmp_path, path, problem, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET", str(tmp_path))
    (tmp_path / "pics").mkdir()
    with pytest.raises(UserError) as error:
        opened(path.replace("{here}", str(tmp_path)))
    assert str(error.value).startswith(f"data.images: {problem.format(here=tmp_path, home=Path.home())}")


def load_with(tmp_path, **captions):
    """The captions of an image with these files beside it."""
    save(tmp_path / "a.png", None)
    for suffix, content in captions.items():
        (tmp_path / f"a.{suffix}").write_bytes(content.encode() if isinstance(content, str) else content)
    return opened(str(tmp_path)).items(0, 1)[0].load().captions


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('"one"', [("one", 1)]),
        ('["one", " two "]', [("one", 1), ("two", 1)]),
        ('{"caption": "one", "url": "x"}', [("one", 1)]),
        ('{"captions": ["one", "two"], "weights": [2, 0.5]}', [("one", 2), ("two", 0.5)]),
        ('{"captions": ["one", "", null, "two"], "weights": [1, 2, 3, 0]}', [("one", 1)]),
        ('\ufeff{"caption": "größer"}', [("größer", 1)]),
        ('{"url": "metadata alone"}', [("of the txt", 1)]),
    ],
)
def test_the_forms_of_json_captions(tmp_path, content, expected):
    found = load_with(tmp_path, json=content, txt="of the txt\n")
    assert found == tuple(Caption(text, weight) for text, weight in expected)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "caption a.txt is missing"),
        ({"txt": " \n"}, "caption a.txt is empty"),
        ({"txt": b"\xff"}, "caption a.txt is not UTF-8; save it as UTF-8"),
        ({"txt": b"x" * (2**20 + 1)}, "a.txt has 1048577 bytes; the limit is 1048576"),
        ({"json": "{"}, "caption a.json is not JSON"),
        ({"json": "[" * 100_000}, "caption a.json is not JSON"),
        ({"json": "[]"}, "caption a.json is empty"),
        ({"json": "3"}, "caption a.json holds int, not text"),
        ({"json": '"\\ud800"'}, "caption a.json is not UTF-8"),
        ({"json": '{"captions": ["a", "b"], "weights": [1]}'}, "caption a.json has 2 texts and 1 weight"),
        ({"json": '{"captions": ["a"], "weights": [-1]}'}, "caption a.json has the weight -1; weights are numbers"),
        ({"json": '{"captions": ["a"], "weights": [NaN]}'}, "caption a.json has the weight nan"),
        (
            {"json": '{"captions": ["a"], "weights": [1e39]}'},
            r"caption a.json has the weight 1e\+39; weights are numbers, 0 or from 1.2e-38 to 3.4e\+38",
        ),
        ({"json": '{"captions": ["a"], "weights": [1e-60]}'}, "caption a.json has the weight 1e-60; weights are"),
        ({"json": '{"captions": ["a"], "weights": [Infinity]}'}, "caption a.json has the weight inf"),
        (
            {"json": f'{{"captions": ["a"], "weights": [{"9" * 400}]}}'},
            f"caption a.json has the weight {'9' * 20}; weights are",
        ),
        ({"json": '{"captions": ["a"], "weights": ["x"]}'}, "caption a.json has the weight x"),
        ({"json": '{"captions": ["a"], "weights": [0]}'}, "caption a.json is empty"),
        ({"json": '{"url": "x"}'}, "caption a.txt is missing, and a.json has neither caption nor captions$"),
    ],
)
def test_captions_that_cannot_be_used(tmp_path, files, reason):
    with pytest.raises(Unusable, match=f"^{reason}"):
        load_with(tmp_path, **files)


def test_damaged_and_vanished_images_are_unusable_and_an_empty_folder_is_an_error(tmp_path):
    save(tmp_path / "a.png", image=gradient(64, 64))
    item = opened(str(tmp_path)).items(0, 1)[0]
    (bare,) = opened({"path": str(tmp_path), "caption": "a cat"}).items(0, 1)
    image = tmp_path / "a.png"
    whole = image.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not an image", b""):
        image.write_bytes(damaged)
        with pytest.raises(Unusable, match="damaged image: "):
            item.load()
    image.unlink()
    with pytest.raises(Unusable, match=r"^a\.png is missing$"):  # the caption is there, and so is its disk
        item.read()
    (tmp_path / "a.txt").rename(tmp_path.parent / "moved.txt")
    with pytest.raises(UserError, match=r"data\.images: .*a\.png is missing, and .* is empty: mount its disk, or"):
        bare.load()


def test_what_is_no_file_is_unusable_and_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to("/dev/zero")
    (tmp_path / "c.png").symlink_to(tmp_path / "nothing")
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("a caption")
    reasons = []
    for item in opened({"path": str(tmp_path), "follow_links": True}).items(0, 3):
        with pytest.raises(Unusable) as error:
            item.load()
        reasons.append(str(error.value))
    assert reasons == [
        "path a.png: it is a named pipe, and a regular file was expected",
        "path b.png: it is a device, and a regular file was expected",
        "c.png is a link to nothing",
    ]


def test_references_are_found_by_any_name_of_an_image_and_bad_ones_are_a_line_each(tmp_path, capsys):
    for name in "abcd":
        save(tmp_path / f"{name}.png", "an edit")
    for name in ("a.reference.PNG", "b.Reference.jpg", "z.reference.png"):
        gradient().convert("RGB").save(tmp_path / name)
    (tmp_path / "c.reference.png").write_bytes(b"no image")
    a, b, c, d = opened(str(tmp_path), references=1).items(0, 9)
    assert [len(item.load().references) for item in (a, b)] == [1, 1]
    assert reason(c).startswith("reference: damaged image: ")
    assert reason(d) == "reference d.reference.png is missing"
    capsys.readouterr()
    assert [item.name for item in opened(str(tmp_path)).items(0, 9)][4:] == [
        "z.reference.png"
    ]  # it has no image, so it is one
    assert capsys.readouterr().err == f"data.images: other files in {tmp_path} are ignored: 3 references\n"
    save(tmp_path / "below/e.png")
    with pytest.raises(UserError, match=r"holds no references; put x\.reference\.png beside x\.png, or set it to 0"):
        opened(str(tmp_path / "below"), references=1)


def test_references_named_as_for_other_trainers_are_none_themselves(tmp_path, capsys):
    save(tmp_path / "a.png", "an edit")
    save(tmp_path / "b-condlabel.png", "a photo of a label")
    for name in ("a-condlabel.png", "no-condlabel.png"):
        gradient().convert("RGB").save(tmp_path / name)
    names = ["a.png", "b-condlabel.png", "no-condlabel.png"]
    found = opened(str(tmp_path), references=1).items(0, 9)
    assert [item.name for item in found] == names
    assert len(found[0].load().references) == 1
    capsys.readouterr()
    assert [item.name for item in opened(str(tmp_path)).items(0, 9)] == names
    assert f"other files in {tmp_path} are ignored: 1 reference\n" in capsys.readouterr().err


def test_later_references_may_be_missing_where_the_fewest_are_set(tmp_path):
    for name, marks in {"a": "12", "b": "1", "c": "2", "d": ""}.items():
        save(tmp_path / f"{name}.png", "an edit")
        for mark in marks:
            gradient().convert("RGB").save(tmp_path / f"{name}.reference{mark if mark > '1' else ''}.png")
    a, b, c, d = opened(str(tmp_path), references=2, min_references=1).items(0, 9)
    assert [len(item.load().references) for item in (a, b)] == [2, 1]
    assert [reason(each) for each in (c, d)] == [f"reference {name}.reference.png is missing" for name in "cd"]
    _, b, *_ = opened(str(tmp_path), references=2).items(0, 9)
    assert reason(b) == "reference b.reference2.png is missing"
