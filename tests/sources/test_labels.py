"""Classes of images, from folders, a column or a JSON key. Captions are not needed."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_sources import opened, png, reason, save, write_tar

from bigdit.errors import UserError


def labels(source):
    return [item.load().label for item in source.items(0, len(source))]


@pytest.fixture
def folder(tmp_path):
    """Three images in two folders of classes, one of them deeper, and one image beside them."""
    for name in ("cat/1.png", "cat/more/0.png", "ant/0.png", "loose.png"):
        save(tmp_path / "images" / name, caption=None)
    return tmp_path / "images"


def test_the_first_folder_of_a_image_is_its_class(folder):
    source = opened({"path": folder, "label": "folder"})
    items = source.items(0, len(source))
    assert [item.load().label for item in items[:3]] == ["ant", "cat", "cat"]
    assert items[0].load().captions == ()
    assert source.class_names == ["ant", "cat"]
    assert reason(items[3]) == "image outside a class folder; put it into a folder with the name of its class"


def test_captions_are_asked_for_where_there_is_no_label(folder):
    source = opened(str(folder))
    assert reason(source.items(0, 1)[0]) == "caption 0.txt is missing"
    assert source.class_names == []


def test_classes_of_all_sources_are_numbered_together_or_as_they_are_named(folder, tmp_path):
    save(tmp_path / "more/bee/0.png", caption=None)
    images = [{"path": folder, "label": "folder"}, {"path": tmp_path / "more", "label": "folder"}]
    assert opened(images).class_names == ["ant", "bee", "cat"]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_column_holds_labels(folder, tmp_path, form):
    rows = [("cat/1.png", "cat"), ("ant/0.png", "ant"), ("cat/more/0.png", " ")]
    file = folder / f"rows.{form}"
    if form == "csv":
        file.write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in rows))
    else:
        columns = {"path": [path for path, _ in rows], "label": [label for _, label in rows]}
        pq.write_table(pa.table(columns), file)
    source = opened({"path": file, "label": "label"})
    items = source.items(0, 3)
    assert [item.load().label for item in items[:2]] == ["cat", "ant"]
    row = f"rows.{form} row 3"
    assert reason(items[2]) == f"label column label is ' '; expected the name or the number of a class ({row})"
    assert source.identity["digest"] != opened({"path": file, "captions": "label"}).identity["digest"]


def test_numbers_of_a_column_are_classes(tmp_path):
    table = pa.table({"image": [png(1), png(2), png(3)], "class": [7, 0, None]})
    pq.write_table(table, tmp_path / "rows.parquet")
    items = opened({"path": tmp_path / "rows.parquet", "label": "class"}).items(0, 3)
    assert [item.load().label for item in items[:2]] == [7, 0]
    assert reason(items[2]).startswith("label column class is 'None'; expected the name or the number")


def test_a_key_of_json_in_a_tar_is_the_label(tmp_path):
    good = [
        ("a.png", png(1)),
        ("a.json", b'{"class": 4, "caption": "x"}'),
        ("b.png", png(2)),
        ("b.json", b'{"class": "cat"}'),
    ]
    bad = [
        ("c.png", png(3)),
        ("c.txt", b"x"),
        ("d.png", png(4)),
        ("d.json", b'{"class": true}'),
        ("e.png", png(5)),
        ("e.json", b"["),
    ]
    tar = write_tar(tmp_path / "0.tar", [*good, *bad])
    source = opened({"path": tar, "label": "class"}, features=tmp_path / "features")
    items = source.items(0, 5)
    assert [item.load().label for item in items[:2]] == [4, "cat"]
    assert [reason(item) for item in items[2:]] == [
        "label c.json is missing",
        "label d.json: class is 'True'; expected the name or the number of a class",
        "label e.json is not JSON",
    ]
    captions = opened(str(tar), features=tmp_path / "features")
    assert source.identity["digest"] != captions.identity["digest"]


@pytest.mark.parametrize(
    ("name", "label", "problem"),
    [
        ("", "class", "data.images.label: {} is of kind folder, which has no columns; set it to folder"),
        ("rows.csv", "clas", "data.images.label: {} has no column clas; did you mean class?"),
    ],
)
def test_labels_that_are_not_there_are_one_line(folder, name, label, problem):
    (folder / "rows.csv").write_text("path,class\nant/0.png,ant\n")
    with pytest.raises(UserError) as error:
        opened({"path": folder / name, "kind": "csv" if name else "folder", "label": label})
    (line,) = error.value.problems
    assert line.startswith(problem.format(folder / name))
