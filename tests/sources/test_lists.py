"""Captions as other trainers keep them: files beside images, metadata of folders, and lists in JSON and UTF-16."""

import base64
import json
import math
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_sources import opened, png, reason, save, texts, value

from bigdit.errors import UserError


def lines(*rows):
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


@pytest.mark.parametrize(
    ("image", "caption"),
    [
        ("a.png", "a.caption"),
        ("a.PNG", "a.TXT"),
        ("a.png", "a.png.txt"),
        ("a.png", "a.png.Json"),
        ("a.jfif", "a.txt"),
        ("a.png", "a.PNG.txt"),
        ("a.JPEG", "a.jpeg.TXT"),
        (unicodedata.normalize("NFD", "é.png"), unicodedata.normalize("NFC", "é.txt")),
        (unicodedata.normalize("NFC", "é.png"), unicodedata.normalize("NFD", "é.txt")),
    ],
)
def test_the_names_of_captions_beside_an_image(tmp_path, image, caption):
    (tmp_path / image).write_bytes(png())
    before = opened(str(tmp_path))
    assert reason(before.items(0, 1)[0]).endswith(".txt is missing")
    (tmp_path / caption).write_text('"one"')
    source = opened(str(tmp_path))
    (item,) = source.items(0, 1)
    assert texts(item)[0][0].strip('"') == "one"
    assert source.identity["digest"] != before.identity["digest"]


def test_text_wins_over_caption_and_both_may_be_utf_16(tmp_path):
    save(tmp_path / "a.png", None)
    (tmp_path / "a.caption").write_text("größer", "utf-16")
    assert texts(opened(str(tmp_path)).items(0, 1)[0]) == [("größer", 1)]
    (tmp_path / "a.txt").write_text("a text")
    assert texts(opened(str(tmp_path)).items(0, 1)[0]) == [("a text", 1)]


@pytest.mark.parametrize("encoding", ["utf-32", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_what_is_no_text_of_these_encodings_is_no_caption(tmp_path, encoding):
    save(tmp_path / "a.png", None)
    (tmp_path / "a.txt").write_text("a cat", encoding)
    problem = "caption a.txt has zero bytes, as other encodings do; save it as UTF-8"
    assert reason(opened(str(tmp_path)).items(0, 1)[0]) == problem


def test_captions_that_have_the_name_of_no_image_are_named(tmp_path, capsys):
    save(tmp_path / "a.png", "beside")
    (tmp_path / "a.caption").write_text("less than a.txt, and of a.png too")
    opened(str(tmp_path))
    assert capsys.readouterr().err == ""
    save(tmp_path / "below/A.png", None)
    for name in ("metadata.json", "below/a.txt"):
        (tmp_path / name).write_text("x")
    opened(str(tmp_path))
    named = "below/a.txt, metadata.json; to read a list, name its path"
    assert (
        capsys.readouterr().err == f"data.images: 2 captions in {tmp_path} without an image of the same name: {named}\n"
    )


def test_lists_of_paths_without_suffixes_and_of_urls(folder):
    (folder / "list.json").write_text(json.dumps({"images/1": {"caption": "one"}, "https://a.b/1.png": "two"}))
    one, two = opened(str(folder / "list.json")).items(0, 2)
    assert (value(one.load()), texts(one)) == (1, [("one", 1)])
    assert reason(two) == "image is a URL, which is not read; download it, and name the file (list.json row 2)"
    for url in ("https://a.b/images", "s3://bucket/list.csv"):
        with pytest.raises(UserError, match=r"^data\.images: .* is a URL, and images are read from this machine"):
            opened(url)


METADATA = {
    "metadata.jsonl": lines(
        {"file_name": "a.png", "text": "of a"},
        {"file_name": "./below/b.png", "text": ["one", "two"]},
        {"file_name": "c.png", "text": "beside it is another"},
        {"file_name": "d.png", "text": []},
        "{no JSON",
        {"file_name": "gone.png", "text": "x"},
    ),
    "metadata.csv": 'file_name,text\na.png ,of a\nbelow\\b.png,"one, two"\nc.png,x\nd.png,\n,no name\ngone.png,x\n',
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_a_folder_is_found(tmp_path, name, capsys):
    for image in ("a.png", "below/b.png", "d.png", "e.png"):
        save(tmp_path / image, None)
    save(tmp_path / "c.png", "beside")
    (tmp_path / name).write_text(METADATA[name])
    source = opened(str(tmp_path))
    a, b, c, d, e = source.items(0, 9)
    assert texts(a) == [("of a", 1)]
    assert texts(b) == ([("one", 1), ("two", 1)] if name.endswith("jsonl") else [("one, two", 1)])
    assert texts(c) == [("beside", 1)]
    assert reason(d) == f"{name} row 4: caption column text is empty"
    assert reason(e) == f"caption is missing: no file beside it, and no row of {name}"
    row = "line is not JSON" if name.endswith("jsonl") else "column file_name names no image"
    assert [line.removeprefix("data.images: ") for line in capsys.readouterr().err.splitlines()] == [
        f"{name} row 5: {row}",
        f"1 row of {tmp_path / name} names no image: gone.png",
    ]
    (tmp_path / name).write_text(METADATA[name].replace("of a", "of b"))
    assert opened(str(tmp_path)).identity["digest"] != source.identity["digest"]
    edited = zip(source.entries(), opened(str(tmp_path)).entries(), strict=True)
    assert [now.name for then, now in edited if then.captions != now.captions] == ["a.png"]


def test_metadata_may_be_a_parquet_file(tmp_path, capsys):
    for image in ("a.png", "below/b.png", "c.png"):
        save(tmp_path / image, None)
    rows = {"a.png": ["of a", "a"], "below/b.png": ["b"], "c.png": [], None: ["no name"], "gone.png": ["x"]}
    pq.write_table(pa.table({"file_name": [*rows], "text": [*rows.values()]}), tmp_path / "metadata.parquet")
    a, b, c = opened(str(tmp_path)).items(0, 9)
    assert (texts(a), texts(b)) == ([("of a", 1), ("a", 1)], [("b", 1)])
    assert reason(c) == "metadata.parquet row 3: caption column text is empty"
    assert [line.removeprefix("data.images: ") for line in capsys.readouterr().err.splitlines()] == [
        "metadata.parquet row 4: column file_name names no image",
        f"1 row of {tmp_path}/metadata.parquet names no image: gone.png",
    ]


def test_rows_of_metadata_that_are_not_used_are_named(tmp_path, capsys):
    save(tmp_path / "a.png", None)
    rows = [{"file_name": name, "text": name} for name in ("a.png", "./a.png")]
    (tmp_path / "metadata.jsonl").write_text(lines(*rows))
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,x\n")
    (tmp_path / "LIST.JSONL").write_text(lines(*rows))
    assert texts(opened(str(tmp_path)).items(0, 1)[0]) == [("./a.png", 1)]
    assert [line.removeprefix("data.images: ") for line in capsys.readouterr().err.splitlines()] == [
        f"{tmp_path}/metadata.csv is ignored, because metadata.jsonl is beside it; put its rows there",
        "metadata.jsonl row 2: a.png has an earlier row, which is ignored",
        f"other files in {tmp_path} are ignored: 1 .JSONL file; to read a list or a table, name its path",
    ]


def test_the_nearest_metadata_counts_and_rows_of_others_are_named(tmp_path, capsys):
    for folder in ("", "below/", "below/deep/"):
        save(tmp_path / f"{folder}a.png", None)
    rows = [{"file_name": name, "text": "above"} for name in ("a.png", "below/a.png", "below/deep/a.png", "gone.png")]
    (tmp_path / "metadata.jsonl").write_text(lines(*rows))
    (tmp_path / "below/metadata.csv").write_text("file_name,text\na.png,near\ndeep/a.png,near\n")
    assert [texts(item) for item in opened(str(tmp_path)).items(0, 3)] == [
        [(text, 1)] for text in ("above", "near", "near")
    ]
    nearer = "2 rows of {} are ignored, because nearer metadata counts: below/a.png, below/deep/a.png"
    assert [line.removeprefix("data.images: ") for line in capsys.readouterr().err.splitlines()] == [
        nearer.format(tmp_path / "metadata.jsonl"),
        f"1 row of {tmp_path}/metadata.jsonl names no image: gone.png",
    ]


def test_columns_of_metadata_are_chosen_as_of_a_table(tmp_path, capsys):
    save(tmp_path / "a.png", None)
    (tmp_path / "metadata.jsonl").write_text(lines({"file_name": "a.png", "text": "short", "caption": "long"}))
    assert reason(opened(str(tmp_path)).items(0, 1)[0]).startswith("caption is missing")
    problem = f"data.images.captions: {tmp_path}/metadata.jsonl has caption, text: say which is meant; its columns: "
    assert capsys.readouterr().err.startswith(problem)
    chosen = opened({"path": str(tmp_path), "captions": {"text": 1, "caption": 3}})
    assert texts(chosen.items(0, 1)[0]) == [("short", 1), ("long", 3)]
    with pytest.raises(UserError, match="has no column txt"):
        opened({"path": str(tmp_path), "captions": "txt"})


ONE, TWO = "images/1.png", "images/2.png"
LISTS = {
    "list.jsonl": lines({"file_name": ONE, "text": "one"}, {"file_name": TWO, "text": ["a", "b"]}),
    "lines.json": lines({"path": ONE, "caption": "one"}, {"path": TWO, "caption": ["a", "b"]}),
    "list.json": json.dumps([{"image": ONE, "captions": "one"}, {"image": TWO, "captions": ["a", "b"]}]),
    "texts.json": json.dumps({ONE: "one", TWO: ["a", "b"]}),
    "objects.json": json.dumps({ONE: {"caption": "one"}, TWO: {"caption": ["a", "b"]}}),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_lists_in_json(folder, name, encoding):
    (folder / name).write_text(LISTS[name], encoding)
    one, two = opened(str(folder / name)).items(0, 9)
    assert (value(one.load()), texts(one)) == (1, [("one", 1)])
    assert (value(two.load()), texts(two)) == (2, [("a", 1), ("b", 1)])


def test_a_list_of_one_object_and_a_first_row_of_no_text_are_read(folder):
    rows = [{"image": ONE, "caption": each} for each in (math.nan, 5, {"a": 1}, "one")]
    (folder / "one.json").write_text(json.dumps(rows[3]))
    (folder / "list.jsonl").write_text(lines(*rows))
    (one,) = opened(str(folder / "one.json")).items(0, 9)
    *bad, last = opened(str(folder / "list.jsonl")).items(0, 9)
    assert (value(one.load()), texts(one), texts(last)) == (1, [("one", 1)], [("one", 1)])
    assert [reason(item)[:29] for item in bad] == ["caption column caption holds "] * 3


def test_a_bad_line_of_jsonl_is_one_row(folder):
    good = [{"image": f"images/{number % 10}.png", "caption": f"number {number}"} for number in range(3000)]
    bad = ["{", "", "[1]", {"image": 3, "caption": "x"}, {"image": "images/1.png", "caption": []}, {"caption": "x"}]
    bad += [{"image": "images/1.png", "caption": 3}, {"image": "images/77.png", "caption": "x"}]
    (folder / "list.jsonl").write_text(lines(*good[:2000], *bad, *good[2000:]))
    source = opened(str(folder / "list.jsonl"))
    assert len(source) == 3008
    assert [(item.name, reason(item)) for item in source.items(2000, 2008)] == [
        ("list.jsonl row 2001", "line is not JSON"),
        ("list.jsonl row 2002", "line is empty"),
        ("list.jsonl row 2003", "line holds list, not an object"),
        ("list.jsonl row 2004", "column image names no image"),
        ("images/1.png", "caption column caption is empty (list.jsonl row 2005)"),
        ("list.jsonl row 2006", "column image names no image"),
        ("images/1.png", "caption column caption holds int, not text (list.jsonl row 2007)"),
        ("images/77.png", "image 77.png is missing; its path is relative to the table (list.jsonl row 2008)"),
    ]
    assert [texts(item) for item in source.items(2008, 3008)] == [[(each["caption"], 1)] for each in good[2000:]]


@pytest.mark.parametrize("name", ["list.tsv", "list.csv"])
@pytest.mark.parametrize("delimiter", ["\t", ";"])
def test_tables_as_excel_writes_them(folder, name, delimiter):
    delimiter = "\t" if name.endswith("tsv") else delimiter
    rows = [("image", "caption"), ("images/1.png", "größer, schöner"), ("images/2.png", "two")]
    (folder / name).write_text("\r\n".join(map(delimiter.join, rows)) + "\r\n", "utf-16")
    one, two = opened(str(folder / name)).items(0, 9)
    assert (value(one.load()), texts(one), texts(two)) == (1, [("größer, schöner", 1)], [("two", 1)])


def test_a_table_may_name_an_image_in_another_normal_form(folder):
    (folder / "images/1.png").rename(folder / "images" / unicodedata.normalize("NFD", "é.png"))
    (folder / "list.csv").write_text(unicodedata.normalize("NFC", "path,caption\nimages/é.png,one\n"))
    assert value(opened(str(folder / "list.csv")).items(0, 1)[0].load()) == 1


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("list.json", "{", "list.json is not JSON at line 1, column 2; expected a list of objects"),
        ("list.json", '[{"image": "1.png"},\n]', "list.json is not JSON at line 2, column 1; expected a list"),
        (
            "list.jsonl",
            '\ufeff{"image": "1.png"},\n{"image": "2.png"},\n',
            "list.jsonl holds no objects in its first 2 lines, the first line ends in a comma; a line of JSONL is",
        ),
        ("list.json", "3", 'list.json holds no list; expected a list such as [{"image": "1.png", "caption": "a cat"}]'),
        ("list.json", '{"images": [{}], "annotations": [{}]}', "list.json holds annotations of COCO; expected a list"),
        ("list.json", "[]", "list.json has no rows"),
        ("list.jsonl", "", "list.jsonl has no rows"),
        (
            "list.jsonl",
            "a cat\na dog\n",
            "list.jsonl holds no objects in its first 2 lines, the first line is not JSON; a line of JSONL is such as",
        ),
        (
            "list.jsonl",
            '\n[{"image": "1.png"}]',
            "list.jsonl holds a list in JSON, and each line of a .jsonl is an object;",
        ),
        (
            "list.jsonl",
            '{"image": "a", "width": 3}\n',
            "has none of caption, captions, text: say which is meant; its columns: image, width",
        ),
        (
            "list.jsonl",
            '{"image": 5, "text": {"a": 1}}\n',
            "holds numbers in image, not image; its columns: image, text",
        ),
        ("list.json", '{"image": ["a"], "caption": ["b"]}', "list.json holds texts in image, not image; its columns: "),
        (
            "list.csv",
            "1.png,a cat\n2.png,a dog\n",
            "list.csv has no header; its first line should name its columns, as",
        ),
        (
            "list.csv",
            "path,caption\ra.png,a\r",
            "list.csv ends its lines in a carriage return alone; save it with line",
        ),
        ("list.csv", "path,caption\na.png,a\n".encode("utf-16-le"), "list.csv is not UTF-8: it has zero bytes, as"),
        ("list.csv", "\ufeffpath,caption\n".encode("utf-16")[:-1], "begins as UTF-16, and is damaged"),
        ("list.xlsx", "PK", "list.xlsx is an Excel table; save it as CSV"),
        ("", "", "holds no images (.png, "),
        ("pictures/a.heic", "x", ".bmp, .tif, .tiff, .gif), but 1 .heic file; convert images to PNG or JPEG"),
        ("pictures/a.mp4", "x", "but 1 .mp4 file; for videos set data.fps, and buckets of [frames, height, width]"),
        ("pictures/a.TS", "x", "but 1 .TS file; convert videos to MP4"),
        (
            "list.json",
            '[["a.png", "x"]]',
            "list.json holds no objects in its first 1 line, the first line holds list, not",
        ),
    ],
)
def test_lists_that_cannot_be_used_are_one_line(tmp_path, name, text, problem):
    if name:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        opened(str(tmp_path / (name if name.startswith("list") else "pictures" if name else "")))
    assert problem in str(error.value)
    assert all("\n" not in line for line in error.value.problems)


def test_a_list_in_a_folder_is_named(tmp_path, capsys):
    (tmp_path / "list.jsonl").write_text(lines({"image": "below/a.png", "caption": "x"}))
    with pytest.raises(UserError, match=r"; it holds the list list\.jsonl: give its path instead"):
        opened(str(tmp_path))
    save(tmp_path / "below/a.png")
    opened(str(tmp_path))
    assert capsys.readouterr().err.endswith("are ignored: 1 .jsonl file; to read a list or a table, name its path\n")


def test_a_row_with_too_few_or_too_many_references_says_how_many_are_read(tmp_path):
    for name in "abcd":
        save(tmp_path / f"{name}.png", None)
    (tmp_path / "bad.png").write_bytes(b"no image")
    given = [
        [],
        ["b.png"],
        ["b.png", "c.png"],
        ["b.png", "c.png", "d.png"],
        ["b.png", "gone.png"],
        ["b.png", "bad.png"],
    ]
    rows = [{"image": "a.png", "caption": "put it", "reference": each} for each in given]
    (tmp_path / "list.jsonl").write_text(lines(*rows))
    none, one, two, many, gone, bad = opened(str(tmp_path / "list.jsonl"), references=2).items(0, 9)
    assert len(two.load().references) == 2
    assert [reason(item) for item in (none, one, many, gone)] == [
        "column reference names no image (list.jsonl row 1)",
        "column reference names 1 image, and data.references is 2 (list.jsonl row 2)",
        "column reference names 3 images, and data.references is 2 (list.jsonl row 4)",
        "reference: image gone.png is missing; its path is relative to the table (list.jsonl row 5)",
    ]
    assert reason(bad).startswith("reference 2: damaged image: ")
    assert reason(bad).endswith(" (list.jsonl row 6)")
    _, one, *_ = opened(str(tmp_path / "list.jsonl"), references=2, min_references=1).items(0, 9)
    assert len(one.load().references) == 1
    _, one, two, *_ = opened(str(tmp_path / "list.jsonl"), references=3, min_references=2).items(0, 9)
    assert reason(one) == "column reference names 1 image, and data.min_references is 2 (list.jsonl row 2)"
    assert len(two.load().references) == 2


@pytest.mark.parametrize("name", ["list.jsonl", "list.tsv"])
def test_images_in_base64_are_read_as_themselves(tmp_path, name):
    """With or without the start of a data URL. A damaged one is named by its row."""
    cell = base64.b64encode(png(7)).decode()
    cells = [cell, f"data:image/png;base64,{cell}", f"{cell}!", cell.replace("iVBOR", "iVBOS", 1)]
    table = "".join(f"{each}\tx\n" for each in ["image", *cells]).replace("image\tx", "image\tcaption")
    rows = lines(*({"image": each, "caption": "x"} for each in cells))
    (tmp_path / name).write_text(rows if name.endswith("jsonl") else table)
    one, two, damaged, path = opened(str(tmp_path / name)).items(0, 4)
    assert [value(each.load()) for each in (one, two)] == [7, 7]
    assert damaged.name == f"{name} row 3"
    assert reason(damaged) == "image in base64 is damaged; write it again, or name a file"
    assert "is missing" in reason(path)
