"""Parquet and `datasets` folders as sources: real files by the libraries that people use."""

import contextlib
import functools
import json
from concurrent.futures import ThreadPoolExecutor

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_sources import damage, opened, png, reason, snapshot, texts, value

from bigdit.config.data import SourceConfig
from bigdit.errors import UserError
from bigdit.sources.file_rows import FileRows
from bigdit.sources.protocol import Unusable
from bigdit.sources.tables import TableSource


def load_all(path):
    for item in opened(str(path)).items(0, 10**6):
        item.load()


def test_parquet_of_paths_with_lists_of_captions_and_weights(folder):
    table = pa.table(
        {
            "file_name": [f"images/{number}.png" for number in range(4)],
            "captions": [["a", "b"], ["c"], [], None],
            "weights": [[1.0, 3.0], [1.0, 2.0], [], None],
        }
    )
    pq.write_table(table, folder / "list.parquet")
    items = opened({"path": str(folder / "list.parquet"), "captions": {"captions": "weights"}}).items(0, 4)
    assert texts(items[0]) == [("a", 1), ("b", 3)]
    assert [reason(item) for item in items[1:]] == [
        "caption column captions has 1 text and 2 weights (list.parquet row 2)",
        "caption column captions is empty (list.parquet row 3)",
        "caption column captions is empty (list.parquet row 4)",
    ]
    assert texts(opened({"path": str(folder / "list.parquet"), "captions": {"captions": 5}}).items(1, 2)[0]) == [
        ("c", 5)
    ]


def test_lists_of_a_fixed_length_are_captions_and_lists_of_objects_are_named(folder):
    paths = [f"images/{number}.png" for number in range(2)]
    pairs = pa.array([["a", "b"], ["c", "d"]], pa.list_(pa.string(), 2))
    pq.write_table(pa.table({"file_name": paths, "captions": pairs}), folder / "list.parquet")
    items = opened({"path": str(folder / "list.parquet"), "captions": "captions"}).items(0, 2)
    assert [texts(item) for item in items] == [[("a", 1), ("b", 1)], [("c", 1), ("d", 1)]]
    pq.write_table(pa.table({"file_name": paths, "caption": [[{"t": "a"}], [{"t": "b"}]]}), folder / "list.parquet")
    with pytest.raises(UserError, match=r"list\.parquet holds another type in caption, not text; its columns: "):
        opened(str(folder / "list.parquet"))


def test_a_parquet_snapshot_is_read_in_any_order_by_split(tmp_path):
    snapshot(tmp_path / "data", "train-00000-of-00002.parquet", range(50))
    snapshot(tmp_path / "data", "train-00001-of-00002.parquet", range(50, 90))
    snapshot(tmp_path / "data", "test-00000-of-00001.parquet", range(90, 95))
    with pytest.raises(UserError, match=r"data\.images\.split: missing; there are test, train"):
        opened(str(tmp_path))
    with pytest.raises(UserError, match=r"data\.images\.split: there is no tain; did you mean train\?"):
        opened({"path": str(tmp_path), "split": "tain"})
    source = opened({"path": str(tmp_path), "split": "train"})
    assert (len(source), source.identity["sources"][0]["kind"]) == (90, "parquet")
    items = source.items(0, 90)
    assert items[57].name == "train-00001-of-00002.parquet row 8"
    order = [*range(90), *reversed(range(90)), *np.random.default_rng(0).permutation(90)]
    assert [value(items[number].load()) for number in order] == order
    assert [texts(item)[0][0] for item in items] == [f"number {number}" for number in range(90)]
    assert [item.index for item in source.items(45, 55)] == list(range(45, 55))
    other = opened({"path": str(tmp_path / "data/train-*.parquet")})
    assert other.identity == source.identity


def test_parquet_text_that_is_not_utf8_is_reported_by_row(folder):
    broken = pa.StringArray.from_buffers(2, pa.py_buffer(np.int32([0, 2, 4]).tobytes()), pa.py_buffer(b"ok\xff\xfe"))
    table = pa.table({"path": ["images/1.png", "images/2.png"], "caption": broken})
    pq.write_table(table, folder / "list.parquet")
    first, second = opened(str(folder / "list.parquet")).items(0, 2)
    assert texts(first) == [("ok", 1)]
    assert reason(second) == "row of text that is not UTF-8"


def test_damaged_parquet_is_one_line(tmp_path):
    snapshot(tmp_path, "a.parquet", range(20))
    whole = (tmp_path / "a.parquet").read_bytes()
    for damaged in (b"", b"text", whole[:-100], whole[: len(whole) // 2]):
        (tmp_path / "a.parquet").write_bytes(damaged)
        with pytest.raises(UserError, match=r"data\.images: .*a\.parquet cannot be read as parquet: ") as error:
            opened(str(tmp_path / "a.parquet"))
        assert "\n" not in str(error.value)
    zeroed = whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :]
    (tmp_path / "b.parquet").write_bytes(zeroed)
    with pytest.raises(UserError, match=r"data\.images: rows \d+ to \d+ of .*b\.parquet cannot be read: "):
        load_all(tmp_path / "b.parquet")


def test_shards_with_other_columns_are_refused(tmp_path):
    snapshot(tmp_path, "a.parquet", range(3))
    pq.write_table(pa.table({"image": ["x"], "text": ["y"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet differs from .*a\.parquet in the columns image"):
        opened({"path": str(tmp_path), "kind": "parquet"})


def saved(numbers):
    """A data set of images as the `datasets` library makes it."""
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = {
        "image": [{"bytes": png(number), "path": None} for number in numbers],
        "text": [f"number {number}" for number in numbers],
    }
    return datasets.Dataset.from_dict(rows, features=features)


def test_what_datasets_saved_is_read_without_it(tmp_path):
    saved(range(60)).save_to_disk(tmp_path / "one", num_shards=3)
    source = opened(str(tmp_path / "one"))
    assert (len(source), source.identity["sources"][0]["kind"]) == (60, "datasets")
    items = source.items(0, 60)
    assert [value(item.load()) for item in items] == list(range(60))
    assert [texts(item)[0][0] for item in items] == [f"number {number}" for number in range(60)]
    assert items[59].name == "data-00002-of-00003.arrow row 20"

    both = datasets.DatasetDict({"train": saved(range(5)), "test": saved(range(2))})
    both.save_to_disk(tmp_path / "both")
    assert len(opened({"path": str(tmp_path / "both"), "split": "train"})) == 5
    with pytest.raises(UserError, match=r"data\.images\.split: missing; there are train, test"):
        opened(str(tmp_path / "both"))


def test_images_that_datasets_names_by_path(folder):
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = {"image": [str(folder / "images/3.png"), None], "text": ["three", "none"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder / "saved")
    first, second = opened(str(folder / "saved")).items(0, 2)
    assert value(first.load()) == 3
    assert reason(second) == "column image holds no image"


def test_damaged_datasets_folders_are_one_line(tmp_path):
    saved(range(30)).save_to_disk(tmp_path)
    file = tmp_path / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    for damaged in (b"", b"text" * 10, whole[:-8], whole[: len(whole) // 2], whole[: len(whole) // 2] + whole[-8:]):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"data\.images: .*arrow cannot be read as arrow: ") as error:
            opened(str(tmp_path))
        assert "\n" not in str(error.value)
    file.unlink()
    with pytest.raises(UserError, match=r"lacks 1 of 1 files, the first data-00000-of-00001\.arrow"):
        opened(str(tmp_path))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../../etc/passwd"}]}))
    with pytest.raises(UserError, match=r"state\.json names no data files of its folder"):
        opened(str(tmp_path))
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state\.json is missing or damaged; save the data set again"):
        opened(str(tmp_path))


def test_hostile_offsets_and_compressed_arrow_are_refused(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))

    def write(table, **options):
        written = pa.ipc.IpcWriteOptions(**options)
        with (
            pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema, options=written) as writer,
        ):
            writer.write_table(table)

    write(pa.table({"path": ["a", "b"], "caption": ["abc", "defg"]}))
    honest, hostile = (np.int32(offsets).tobytes() for offsets in ([0, 3, 7], [0, 3, 2**30]))
    plain = (tmp_path / "data.arrow").read_bytes()
    assert plain.count(honest) == 1
    (tmp_path / "data.arrow").write_bytes(plain.replace(honest, hostile))
    with pytest.raises(UserError, match=r"rows 1 to 2 of .*data\.arrow cannot be read: "):
        opened(str(tmp_path)).items(0, 2)
    write(pa.table({"path": ["a"] * 10**6, "caption": ["b"] * 10**6}), compression="lz4")
    with pytest.raises(UserError, match=r"compressed Arrow files are not supported"):
        opened(str(tmp_path))


def test_a_large_row_group_is_read_in_little_memory(tmp_path):
    random = np.random.default_rng(0)
    images = [random.bytes(100_000) for _ in range(600)]  # 60 MB in one row group; none is an image
    table = pa.table({"image": images, "text": ["x"] * 600})
    # Pages of a few images. By default writers check a page's size only after 1,024 rows.
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, write_batch_size=8)
    del table
    before, most = pa.total_allocated_bytes(), 0
    del images
    for item in opened(str(tmp_path / "a.parquet")).items(0, 600):
        assert reason(item).startswith("damaged image: ")
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 16e6


def test_threads_read_the_same_parquet(tmp_path):
    snapshot(tmp_path, "a.parquet", range(200), group=64)
    items = opened(str(tmp_path / "a.parquet")).items(0, 200)
    with ThreadPoolExecutor(8) as pool:
        assert [value(sample) for sample in pool.map(lambda item: item.load(), items)] == list(range(200))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_damaged_tables_are_refused_or_skipped_row_by_row(tmp_path, suffix):
    snapshot(tmp_path, "a.parquet", range(20))
    whole = (tmp_path / "a.parquet").read_bytes()
    if suffix == "arrow":
        saved(range(20)).save_to_disk(tmp_path / "saved")
        whole = next((tmp_path / "saved").glob("*.arrow")).read_bytes()
    loaded, problems = 0, []
    for seed in range(100):
        path = tmp_path / f"{seed}.{suffix}"
        path.write_bytes(damage(whole, seed))
        try:
            rows = functools.partial(FileRows, [path], suffix, str(path), "data.images")
            for item in TableSource("parquet", rows, SourceConfig(path=path), "data.images").items(0, 20):
                with contextlib.suppress(Unusable):
                    loaded += item.load().image.size == (8, 8)
        except UserError as error:
            problems += error.problems
    assert loaded > 0
    assert problems
    assert not [problem for problem in problems if "\n" in problem]


def test_paths_that_name_no_file_are_skipped(folder):
    (folder / "images/loop.png").symlink_to(folder / "images/loop.png")
    paths = ["a\0b", "x" * 5000, "images/1.png/x.png", "images", "images/loop.png", None]
    pq.write_table(pa.table({"path": paths, "caption": ["a caption"] * 6}), folder / "list.parquet")
    assert [reason(item) for item in opened(str(folder / "list.parquet")).items(0, 6)] == [
        "path with a zero byte (list.parquet row 1)",
        f"path {'x' * 50}: File name too long (list.parquet row 2)",
        "path x.png: Not a directory (list.parquet row 3)",
        "path images: Is a directory (list.parquet row 4)",
        "path loop.png: Too many levels of symbolic links (list.parquet row 5)",
        "column path names no image",
    ]


def test_a_path_into_a_folder_that_is_not_there_is_one_bad_row(tmp_path):
    cells = [{"bytes": None, "path": "gone/1.png"}, {"bytes": png(7), "path": None}]
    pq.write_table(pa.table({"image": cells, "text": ["one", "two"]}), tmp_path / "a.parquet")
    one, two = opened(str(tmp_path / "a.parquet")).items(0, 2)
    assert reason(one) == "image 1.png is missing; its path is relative to the table"
    assert value(two.load()) == 7
