"""Several sources in a row, of one kind and of all, and the config's messages about them."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import DIGITS
from PIL import Image
from tiny_sources import gradient, opened, pixels, save, write_tar
from tiny_videos import video

from bigdit.config.data import DataConfig
from bigdit.config.stages import load_run
from bigdit.errors import UserError
from bigdit.sources.open import check_sources, open_source
from bigdit.sources.protocol import Unusable


def test_several_sources_follow_one_another_and_appending_changes_nothing_before(tmp_path):
    for name in ("one/a.png", "one/b.png", "two/c.png", "three/d.png", "three/e.png"):
        save(tmp_path / name, name)
    folders = [str(tmp_path / name) for name in ("one", "two", "three")]
    short, whole = opened(folders[:2]), opened(folders)
    assert (len(short), len(whole)) == (3, 5)
    assert whole.identity["sources"][:2] == short.identity["sources"]
    assert [each["count"] for each in whole.identity["sources"]] == [2, 1, 2]
    assert opened(folders[0]).identity["sources"] == whole.identity["sources"][:1]
    items = whole.items(1, 4)
    assert [(item.index, item.name) for item in items] == [
        (1, f"{folders[0]}: b.png"),
        (2, f"{folders[1]}: c.png"),
        (3, f"{folders[2]}: d.png"),
    ]
    moved = pickle.loads(pickle.dumps(items))  # as they are sent to a worker
    assert [item.load().captions[0].text for item in moved] == ["one/b.png", "two/c.png", "three/d.png"]
    assert whole.items(0, 2)[0].name == f"{folders[0]}: a.png"
    assert whole.items(5, 9) == []


def test_an_error_names_the_source_of_the_list(tmp_path):
    save(tmp_path / "one/a.png")
    with pytest.raises(UserError, match=r"data\.images\[1\]: the folder .*two does not exist"):
        opened([str(tmp_path / "one"), str(tmp_path / "two")])


def test_what_is_known_before_extraction_writes_nothing(tmp_path):
    save(tmp_path / "one/a.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "one/a.png", "a.png")
    (tmp_path / "empty").mkdir()

    def checked(*images, listed=True):
        data = load_run(DIGITS, [f"data.images={json.dumps(images)}", f"data.features={tmp_path / 'features'}"]).data
        return check_sources(data, listed=listed)

    one, empty, tars, none = (str(tmp_path / name) for name in ("one", "empty", "*.tar", "none"))
    assert checked(one, tars) == []
    assert not (tmp_path / "features").exists()
    assert checked(one, empty, none) == [f"data.images[2]: {none} does not exist; did you mean {one}?"]
    assert checked(empty, listed=False) == []
    with pytest.raises(UserError, match="holds no images"):
        checked(one, empty)
    with pytest.raises(UserError) as error:
        checked({"path": one, "label": "nope"}, {"path": tars, "split": "a"}, {"path": none, "label": "nope"})
    assert [problem.split(": ")[0] for problem in error.value.problems] == [
        "data.images[0].label",
        "data.images[1].split",
    ]


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ([], "data.images: the list is empty; name a source, such as a folder of images"),
        ({"path": "x", "captoins": "y"}, "data.images.captoins: unknown key; did you mean captions, caption"),
        (
            {"kind": "csv"},
            "data.images.path: missing (a folder of images or videos with captions in .txt or .json files)",
        ),
        ({"path": "x", "kind": "zip"}, "data.images.kind is 'zip', which is unknown; known: csv, datasets, folder"),
        (
            {"path": "x", "captions": {"short": -1}},
            "data.images.captions: the weight of short is a number from 1.2e-38 to 3.4e+38, or a column; -1 was",
        ),
    ],
)
def test_sources_are_checked_by_the_config(images, problem):
    with pytest.raises(UserError) as error:
        load_run(DIGITS, [f"data.images={json.dumps(images)}"])
    (line,) = error.value.problems
    assert problem in line


def test_what_does_not_go_with_a_kind_is_reported_for_all_sources_at_once(tmp_path):
    for name in ("one", "two"):
        save(tmp_path / name / "a.png")
    (tmp_path / "two/a.tar").touch()
    sources = [{"path": str(tmp_path / "one"), "captions": "text"}, str(tmp_path / "two"), str(tmp_path / "three")]
    with pytest.raises(UserError) as error:
        opened(sources)
    assert error.value.problems == (
        f"data.images[0]: {tmp_path}/one is a folder without metadata.jsonl, .csv or .parquet, so it has no columns; "
        "leave out image and captions",
        f"data.images[1].kind: {tmp_path}/two holds files of folder and webdataset; say which is meant",
        f"data.images[2]: the folder {tmp_path}/three does not exist",
    )


def test_pixels_beyond_the_limit_are_refused_in_every_kind(tmp_path):
    """Images of 16 × 16, a video and an animation of two frames."""
    root = tmp_path / "kinds"
    save(root / "plain/a.png", image=gradient(16, 16))
    encoded = (root / "plain/a.png").read_bytes()
    (root / "list.csv").write_text("path,caption\nplain/a.png,a gradient\n")
    pq.write_table(pa.table({"image": [encoded], "caption": ["a gradient"]}), root / "a.parquet")
    write_tar(root / "a.tar", [("a.png", encoded), ("a.txt", b"a gradient")])
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    rows = {"image": [{"bytes": encoded, "path": None}], "caption": ["a gradient"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(root / "saved")
    save(root / "frames/a/1.png", image=gradient(16, 16))
    (root / "frames/a.txt").write_text("a gradient")
    (root / "moving").mkdir()
    video(root / "moving/a.mp4", range(2), size=(16, 16))
    save(root / "moving/b.gif", image=gradient(16, 16), save_all=True, append_images=[Image.new("RGB", (16, 16))])
    write_tar(root / "moving.tar", [("a.mp4", (root / "moving/a.mp4").read_bytes()), ("a.txt", b"a caption")])
    names = ("plain", "list.csv", "a.parquet", "a.tar", "saved", "moving", "moving.tar")
    images = [*(str(root / name) for name in names), {"path": str(root / "frames"), "frame_rate": 8}]

    def items(**limit):
        data = DataConfig(images=images, features=tmp_path / "f", buckets=[(1, 16, 16)], fps=8, **limit)
        return open_source(data).items(0, 99)

    def frames(item):
        image = item.load().image
        return [image] if isinstance(image, Image.Image) else list(image)

    assert len(items()) == 9
    for item in items(max_pixels=256):
        assert frames(item)[0].size == (16, 16)
    for item in items(max_pixels=255):
        with pytest.raises(Unusable, match=r"^image of 16 × 16 = 256 pixels; data\.max_pixels allows 255$"):
            frames(item)


@pytest.mark.parametrize("name", ["meta.xml", "a.png", "LICENSE"])
def test_a_file_of_no_kind_is_named_with_what_is_read(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(UserError) as error:
        opened(str(tmp_path / name))
    what = f"a {Path(name).suffix} file" if "." in name else "a file without a suffix"
    assert str(error.value).startswith(
        f"data.images: {tmp_path / name} is {what}; give a folder of images or videos, a"
    )


def test_pixels_survive_every_kind(folder):
    """The same images and captions, from a folder, a CSV, Parquet, and what datasets saved."""
    image = gradient(24, 16)
    buffer = io.BytesIO()
    image.save(buffer, "png")
    root = folder / "kinds"
    (root / "plain").mkdir(parents=True)
    (root / "plain/a.png").write_bytes(buffer.getvalue())
    (root / "plain/a.txt").write_text("a gradient")
    (root / "list.csv").write_text("path,caption\nplain/a.png,a gradient\n")
    pq.write_table(pa.table({"image": [buffer.getvalue()], "caption": ["a gradient"]}), root / "a.parquet")
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    rows = {"image": [{"bytes": buffer.getvalue(), "path": None}], "caption": ["a gradient"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(root / "saved")
    source = opened([str(root / name) for name in ("plain", "list.csv", "a.parquet", "saved")])
    kinds = [each["kind"] for each in source.identity["sources"]]
    assert kinds == ["folder", "csv", "parquet", "datasets"]
    for item in source.items(0, 4):
        sample = item.load()
        assert pixels(sample.image) == pixels(image)
        assert [caption.text for caption in sample.captions] == ["a gradient"]
