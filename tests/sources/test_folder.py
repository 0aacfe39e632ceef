"""Sources of pictures and captions, from real files of every kind."""

import contextlib
import io
import json
import os
import pickle
import struct
import zlib

import numpy as np
import pytest
from commands import DIGITS
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tiny_sources import damage, gradient, opened, pixels, save

from bigdit.config import load_run
from bigdit.errors import UserError
from bigdit.sources import Caption, Unusable
from bigdit.sources.names import Names
from bigdit.sources.picture import decode


def test_a_folder_is_listed_in_the_order_of_paths(tmp_path):
    names = ("b/2.PNG", "a.jpg", "b/1.webp", "c.bmp", "notes.md", "b-1/x.png", "b.png", "b/d/e.tif")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    source = opened(str(tmp_path))
    pictures = sorted(set(names) - {"notes.md"})
    assert len(source) == len(pictures)
    assert [item.name for item in source.items(0, 99)] == pictures
    assert [(item.index, item.name) for item in source.items(2, 4)] == list(enumerate(pictures))[2:4]


def test_what_a_folder_holds_besides_is_told(tmp_path, capsys):
    save(tmp_path / "a.png")
    (tmp_path / "b.heic").touch()
    (tmp_path / "c.heic").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert len(opened(str(tmp_path))) == 1
    told = f"data.images: {tmp_path} also holds what is not read: 2 .heic files, 1 links to folders\n"
    assert capsys.readouterr().err == told


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
        "b.png": root / "a.png",  # within, by whatever way
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
    out = "is a link out of its folder, and is read with the source's follow_links alone"
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
    assert another != digest  # other features come of it
    (tmp_path / "linked").symlink_to(root)
    assert opened(str(tmp_path / "linked")).items(1, 2)[0].load().captions[0].text == "a caption"
    (tmp_path / "a.csv").write_text("path,caption\na.png,a\n")
    with pytest.raises(UserError, match=r"data\.images\.follow_links: .*a\.csv is of kind csv; it is for folders of"):
        opened({"path": str(tmp_path / "a.csv"), "follow_links": True})


def test_a_missing_and_an_empty_folder_are_errors(tmp_path):
    with pytest.raises(UserError, match=r"data\.images: the folder .*nowhere does not exist"):
        opened(str(tmp_path / "nowhere"))
    (tmp_path / "a.txt").write_text("a caption")
    with pytest.raises(UserError, match=r"data\.images: .* holds no pictures \(\.png, \.jpg"):
        opened(str(tmp_path))


def load_with(tmp_path, **captions):
    """The captions of a picture with such files beside it."""
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
        ({"txt": b"\xff\xfe"}, "caption a.txt is not UTF-8"),
        ({"txt": b"x" * (2**20 + 1)}, "a.txt has 1048577 bytes; 1048576 are the most that is read"),
        ({"json": "{"}, "caption a.json is not JSON"),
        ({"json": "[" * 100_000}, "caption a.json is not JSON"),
        ({"json": "[]"}, "caption a.json is empty"),
        ({"json": "3"}, "caption a.json holds int, not text"),
        ({"json": '"\\ud800"'}, "caption a.json is not UTF-8"),
        ({"json": '{"captions": ["a", "b"], "weights": [1]}'}, "caption a.json has 2 texts and 1 weights"),
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
        ({"json": '{"url": "x"}'}, "caption a.txt is missing"),
    ],
)
def test_captions_that_cannot_be_used(tmp_path, files, reason):
    with pytest.raises(Unusable, match=f"^{reason}"):
        load_with(tmp_path, **files)


def test_damaged_pictures_are_unusable_and_vanished_ones_an_error(tmp_path):
    save(tmp_path / "a.png", picture=gradient(64, 64))
    item = opened(str(tmp_path)).items(0, 1)[0]
    picture = tmp_path / "a.png"
    whole = picture.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not a picture", b""):
        picture.write_bytes(damaged)
        with pytest.raises(Unusable, match="damaged picture: "):
            item.load()
    picture.unlink()
    with pytest.raises(UserError, match=r"data\.images: .*a\.png cannot be read: No such file"):
        item.load()


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
    assert reasons == ["a.png is not a file", "b.png is not a file", "c.png is a link to nothing"]


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        *[(mode, "png") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")],
        *[(mode, "tif") for mode in ("CMYK", "YCbCr", "LAB", "I;16B")],
        *[(mode, "jpg") for mode in ("L", "RGB", "CMYK")],
        *[("RGB", suffix) for suffix in ("webp", "avif", "bmp", "gif")],
    ],
)
def test_pictures_of_every_mode_become_rgb_or_gray(tmp_path, mode, suffix):
    gray = mode in ("1", "L", "LA", "I;16", "I;16B")
    picture = gradient(16, 16, "L").convert(mode) if mode.startswith("I;16") else gradient(16, 16, mode)
    save(tmp_path / f"a.{suffix}", picture=picture)
    image = opened(str(tmp_path)).items(0, 1)[0].load().image
    assert image.mode == ("L" if gray else "RGB")
    assert image.size == (16, 16)


def loaded(tmp_path, picture, suffix="png", **options):
    """A picture, written and read."""
    save(tmp_path / f"a.{suffix}", picture=picture, **options)
    return opened(str(tmp_path)).items(0, 1)[0].load().image


def test_exif_rotation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270° to see it upright
    upright = loaded(tmp_path, gradient(12, 8), exif=exif)
    assert pixels(upright) == np.rot90(np.asarray(gradient(12, 8)), -1).tolist()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_lies_over_white(tmp_path, mode):
    if mode == "P":
        clear, options = gradient(8, 8, "P").point(lambda _: 3), {"transparency": 3}
    else:
        clear, options = Image.new("RGBA", (8, 8), (255, 0, 0, 0)).convert(mode), {}
    assert set(np.asarray(loaded(tmp_path, clear, **options)).flat) == {255}


@pytest.mark.parametrize("suffix", ["tif", "jpg"])
def test_cmyk_without_ink_is_white_and_with_all_black(tmp_path, suffix):
    cmyk = Image.new("CMYK", (16, 8))
    cmyk.paste((0, 0, 0, 255), (8, 0, 16, 8))
    image = loaded(tmp_path, cmyk, suffix)
    assert (image.getpixel((0, 0)), image.getpixel((15, 7))) == ((255,) * 3, (0,) * 3)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_scaled(tmp_path, suffix):
    deep = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    image = loaded(tmp_path, Image.fromarray(deep), suffix)
    assert pixels(image) == np.arange(256).reshape(16, 16).tolist()


def png_16(samples, color_type, *chunks):
    """A PNG of 16-bit samples [H, W, C], which Pillow does not write for every color type."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = samples.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    size = struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)
    parts = [(b"IHDR", size), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize(("color_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bits_of_every_png_are_scaled(tmp_path, color_type, channels):
    """0 is gray, 2 RGB, 4 and 6 with alpha, which is opaque here."""
    deep = np.repeat(np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16, 1), channels, axis=2)
    if color_type in (4, 6):
        deep[..., -1] = 65535
    save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(png_16(deep, color_type))
    image = opened(str(tmp_path)).items(0, 1)[0].load().image
    assert image.mode == ("L" if color_type == 0 else "RGB")  # Pillow reads gray with alpha as RGBA
    assert np.array_equal(np.asarray(image).reshape(256, -1)[:, 0], np.arange(256))


def test_a_gray_of_16_bits_that_means_transparent_becomes_white(tmp_path):
    deep = np.array([[[0], [1000], [65535]]], np.uint16)
    save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(png_16(deep, 0, (b"tRNS", struct.pack(">H", 1000))))
    assert pixels(opened(str(tmp_path)).items(0, 1)[0].load().image) == [[0, 255, 255]]


def test_32_bits_are_refused_by_name(tmp_path):
    with pytest.raises(Unusable, match=r"32 bits a sample \(mode F\), whose white is unknown; save it with 8 or 16"):
        loaded(tmp_path, gradient(8, 8, "F"), "tif")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # pytest undoes filters of modules
def test_more_pixels_than_pillow_allows_are_refused_before_they_are_decoded(tmp_path):
    save(tmp_path / "a.png", picture=Image.new("1", (20_000, 10_000)))  # 25 kB on the disk, 200 MB as gray
    with pytest.raises(Unusable, match="picture too large: Image size \\(200000000 pixels\\)"):
        opened(str(tmp_path)).items(0, 1)[0].load()
    save(tmp_path / "a.png", picture=Image.new("1", (10_000, 9_000)))
    with pytest.raises(Unusable, match=r"picture too large: 10000 × 9000 pixels; \d+ are the most"):
        opened(str(tmp_path)).items(0, 1)[0].load()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of Pillow, about damaged metadata
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "avif", "tif", "gif", "bmp"])
def test_damaged_pictures_are_decoded_or_unusable(suffix):
    buffer = io.BytesIO()
    gradient(32, 24).save(buffer, {"jpg": "JPEG", "tif": "TIFF"}.get(suffix, suffix.upper()))
    for seed in range(80):
        with contextlib.suppress(Unusable):
            assert decode(damage(buffer.getvalue(), seed)).mode in ("L", "RGB")


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
    moved = pickle.loads(pickle.dumps(items))  # as they travel to a worker
    assert [item.load().captions[0].text for item in moved] == ["one/b.png", "two/c.png", "three/d.png"]
    assert whole.items(0, 2)[0].name == f"{folders[0]}: a.png"
    assert whole.items(5, 9) == []


def test_an_error_names_the_source_of_the_list(tmp_path):
    save(tmp_path / "one/a.png")
    with pytest.raises(UserError, match=r"data\.images\[1\]: the folder .*two does not exist"):
        opened([str(tmp_path / "one"), str(tmp_path / "two")])


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ([], "data.images: the list is empty; name a source, such as a folder of pictures"),
        ({"path": "x", "captoins": "y"}, "data.images.0.captoins: unknown key; did you mean captions?"),
        ({"kind": "csv"}, "data.images.0.path: missing; it has no default"),
        ({"path": "x", "kind": "zip"}, "data.images.0.kind: Input should be 'folder', 'csv', 'parquet', 'webdataset'"),
        (
            {"path": "x", "captions": {"short": -1}},
            "data.images.0.captions: the weight of short is a number from 1.2e-38 to 3.4e+38, or a column; -1 was",
        ),
    ],
)
def test_sources_are_checked_by_the_config(images, problem):
    with pytest.raises(UserError) as error:
        load_run(DIGITS, [f"data.images={json.dumps(images)}"])
    (line,) = error.value.problems
    assert problem in line


def test_what_does_not_go_with_a_kind_is_said_for_all_sources_at_once(tmp_path):
    for name in ("one", "two"):
        save(tmp_path / name / "a.png")
    (tmp_path / "two/a.tar").touch()
    sources = [{"path": str(tmp_path / "one"), "captions": "text"}, str(tmp_path / "two"), str(tmp_path / "three")]
    with pytest.raises(UserError) as error:
        opened(sources)
    assert error.value.problems == (
        f"data.images[0]: {tmp_path}/one is of kind folder, which has no columns; leave out image and captions",
        f"data.images[1].kind: {tmp_path}/two holds files of folder and webdataset; say which is meant",
        f"data.images[2]: the folder {tmp_path}/three does not exist",
    )
