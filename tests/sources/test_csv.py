"""CSV and TSV as sources: rows as written, columns and their weights, and rows that cannot be used."""

import csv
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_sources import opened, reason, texts, value

from bigdit.errors import UserError
from bigdit.sources.protocol import Unusable
from bigdit.sources.text_rows import CsvRows


def test_a_csv_names_images_relative_to_itself(folder):
    (folder / "list.csv").write_text(
        "path,caption,source\n"
        'images/1.png,"a ""quoted"", and\nlong caption",x\n'
        f"{folder}/images/2.png,größer,x\n"
        "images/11.png,gone,x\n"
        "images/3.png,,x\n"
        ",no image,x\n"
        "images/4.png,an, unquoted comma,x\n"
        "\n"
        "images/5.png,last,x"
    )
    items = opened(str(folder / "list.csv")).items(0, 99)
    assert [item.name for item in items[:2]] == ["images/1.png", f"{folder}/images/2.png"]
    assert texts(items[0]) == [('a "quoted", and\nlong caption', 1)]
    assert (value(items[0].load()), value(items[1].load()), value(items[7].load())) == (1, 2, 5)
    assert [reason(item) for item in items[2:7]] == [
        "image 11.png is missing; its path is relative to the table (list.csv row 3)",
        "caption column caption is empty (list.csv row 4)",
        "column path names no image",
        "row of 4 cells under 3 columns",
        "row is empty",
    ]
    assert items[4].name == "list.csv row 5"


def test_a_missing_image_is_one_bad_row_unless_its_disk_may_be_missing(folder):
    """The folder of a disk that is not mounted is there, and empty, and other rows name images there."""
    table = folder / "list.csv"
    table.write_text(
        f"path,caption\nelsewhere/1.png,one\n{folder}/elsewhere/1.png,two\n/nowhere/1.png,three\nimages/1.png,four\n"
    )
    *missing, there = sent(opened(str(table)).items(0, 4))
    one_bad_row = [
        "image 1.png is missing; its path is relative to the table (list.csv row 1)",
        "image 1.png is missing (list.csv row 2)",
        "image 1.png is missing (list.csv row 3)",
    ]
    assert [reason(item) for item in missing] == one_bad_row
    assert value(there.load()) == 1
    (folder / "elsewhere").mkdir()
    assert [reason(item) for item in missing] == one_bad_row
    table.write_text(table.read_text() + "elsewhere/more/2.png,five\n")
    line = rf"data\.images: {folder}/elsewhere/1\.png is missing, and {folder}/elsewhere is empty: mount its disk, or"
    for item in sent(opened(str(table)).items(0, 2)):
        with pytest.raises(UserError, match=line):
            item.load()


def test_a_disk_of_references_may_be_missing_too(folder):
    (folder / "before").mkdir()
    rows = [f"{number}.png,a cat,{{}}" for number in (1, 2)]
    for second, stops in ("images/2.png", False), ("before/2.png", True):
        texts = [row.format(reference) for row, reference in zip(rows, ("before/1.png", second), strict=True)]
        (folder / "list.csv").write_text("path,caption,reference\n" + "".join(f"images/{text}\n" for text in texts))
        source = {"path": str(folder / "list.csv"), "reference": "reference"}
        (item, _) = sent(opened(source, references=1).items(0, 2))
        with pytest.raises(UserError if stops else Unusable, match=r"1\.png is missing"):
            item.load()


def sent(items):
    """Items as a worker gets them."""
    return pickle.loads(pickle.dumps(items))


def test_a_cell_may_hold_a_list_of_captions(folder):
    (folder / "list.tsv").write_text(
        "image\tcaption\n"
        'images/1.png\t["a cat", "a cat, at length"]\n'
        "images/2.png\t['a dog', \"the dog's own\"]\n"
        "images/3.png\t[1girl], smile\n"
        "images/4.png\t[]\n"
        'images/5.png\t["a", 5]\n'
        'images/6.png\t"[\'a dog\' ""the dog\'s own""\n \'a cat\']"\n'
    )
    *items, numpy = opened(str(folder / "list.tsv")).items(0, 9)
    assert texts(numpy) == [(each, 1) for each in ("a dog", "the dog's own", "a cat")]
    assert texts(items[0]) == [("a cat", 1), ("a cat, at length", 1)]
    assert texts(items[1]) == [("a dog", 1), ("the dog's own", 1)]
    assert texts(items[2]) == [("[1girl], smile", 1)]
    assert [reason(item) for item in items[3:]] == [
        "caption column caption is empty (list.tsv row 4)",
        "caption column caption holds int, not text (list.tsv row 5)",
    ]


def test_several_columns_of_captions_have_weights(folder):
    (folder / "list.tsv").write_text(
        "image\tshort\tlong\tscore\n"
        "images/1.png\ta cat\ta cat, at length\t0.25\n"
        "images/2.png\t\ta dog, at length\t3\n"
        "images/3.png\ta cow\ta cow, at length\tmany\n"
    )
    path = str(folder / "list.tsv")
    items = opened({"path": path, "captions": {"short": 2, "long": "score"}}).items(0, 3)
    assert texts(items[0]) == [("a cat", 2), ("a cat, at length", 0.25)]
    assert texts(items[1]) == [("a dog, at length", 3)]
    assert reason(items[2]) == "weight column score holds 'many', not a number (list.tsv row 3)"
    assert texts(opened({"path": path, "captions": ["short", "long"]}).items(0, 1)[0])[1][1] == 1
    one, other = (opened({"path": path, "captions": column}).identity["digest"] for column in ("short", "long"))
    assert one != other


@pytest.mark.parametrize(
    ("text", "config", "problem"),
    [
        (None, {}, r"the file .*list\.csv does not exist"),
        ("", {}, r"list\.csv is empty; its first line should name its columns"),
        ("path,caption\n", {}, r"list\.csv has no rows"),
        ("path,path\n1,2\n", {}, r"has columns of the same name: path, path"),
        ('path,caption\n1.png,"open\n2.png,two\n', {}, r"a quote in .* is never closed"),
        ("a,b\n1,2\n", {}, r"images\.image: .* has none of image, path, .*; its columns: a, b; data\.images\.captions"),
        ("path,image,text\n1,2,3\n", {}, r"images\.image: .* has image, path: say which is meant; its columns: path"),
        ("path,text\n1,2\n", {"captions": "txt"}, r"images\.captions: .* has no column txt; did you mean text\?"),
        ("path,text\n1,2\n", {"split": "train"}, r"images\.split: .* is of kind csv, which has no splits"),
    ],
)
def test_tables_that_cannot_be_used_are_one_line(tmp_path, text, config, problem):
    path = tmp_path / "list.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=problem) as error:
        opened({"path": str(path), **config})
    assert all("\n" not in line for line in error.value.problems)


def test_a_stray_quote_is_an_error_of_its_rows(tmp_path):
    rows = "".join(f'{number}.png,a {12}" screen\n' for number in range(4))
    (tmp_path / "list.csv").write_text("path,caption\n" + rows)
    with pytest.raises(UserError, match=r"has a stray quote or carriage return within rows 1 to \d"):
        opened(str(tmp_path / "list.csv")).items(0, 1)


CELLS = st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=30), ending=st.sampled_from(["\n", "\r\n"]))
def test_csv_is_read_as_it_was_written(tmp_path, rows, ending):
    rows = rows * 90  # several blocks of 1024
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator=ending, quoting=csv.QUOTE_ALL).writerows([("path", "caption"), *rows])
    read = CsvRows(tmp_path / "list.csv", "data.images")
    assert len(read) == len(rows)
    for start, end in ((0, len(rows)), (len(rows) // 3, len(rows) // 2), (1022, 1026)):
        assert [(row["path"], row["caption"]) for row in read.read(start, end, ["path", "caption"])] == rows[start:end]


def test_csv_across_the_chunks_it_is_scanned_in(tmp_path, monkeypatch):
    rows = [(f"{number}.png", f'"{number}",\n' * (number % 5)) for number in range(3000)]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "caption"), *rows])
    whole = CsvRows(tmp_path / "list.csv", "data.images")
    monkeypatch.setattr("bigdit.sources.text_rows.CHUNK_BYTES", 97)
    for read in (whole, CsvRows(tmp_path / "list.csv", "data.images")):
        assert read.digest == whole.digest
        assert [tuple(row.values()) for row in read.read(1000, 3000, ["path", "caption"])] == rows[1000:]


def test_csv_in_other_encodings_loses_just_the_rows_that_are(folder):
    (folder / "list.csv").write_bytes("path,caption\nimages/1.png,größer\nimages/2.png,two\n".encode("latin-1"))
    first, second = opened(str(folder / "list.csv")).items(0, 2)
    assert reason(first) == "caption column caption is not UTF-8 (list.csv row 1)"
    assert texts(second) == [("two", 1)]


def test_paths_of_windows_spaces_and_capitals_are_read(folder):
    """As pandas, Excel and people write them."""
    rows = "images\\1.png, one", 'images/2.png , "two, too"', "C:\\images\\3.png,three"
    (folder / "list.csv").write_text("\r\n".join(["Image, Caption", *rows]))
    one, two, three = opened(str(folder / "list.csv")).items(0, 9)
    assert (value(one.load()), texts(one)) == (1, [("one", 1)])
    assert (value(two.load()), texts(two)) == (2, [("two, too", 1)])
    assert reason(three) == "image is a path of Windows, whose C: is /mnt/c in WSL (list.csv row 3)"
