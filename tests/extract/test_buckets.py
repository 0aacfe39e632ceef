"""Sources with buckets of their own."""

import json

import pytest
from commands import DIGITS, SINGLE, TINY, in_process, with_set
from extracting import configured
from stores import read_rows
from tiny_sources import gradient, opened, save

from bigdit.errors import UserError
from bigdit.extract.extract import extract
from bigdit.loader.stages import plan_order
from bigdit.store import FeatureStore
from bigdit.train.data import open_store

SMALL, TALL = [[8, 8]], [[16, 8], [8, 16]]


@pytest.fixture
def folders(tmp_path):
    """Images of 16 × 8 pixels and of 8 × 16 in a folder, and the same ones in another."""
    for folder in ("one", "two"):
        for number in range(3):
            save(tmp_path / f"{folder}/{number}.png", f"{folder} {number}", gradient(*((16, 8) if number else (8, 16))))
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def asked(images, features, *overrides):
    return configured(json.dumps(images), features, "data.buckets=[[8,8]]", *overrides)


def shapes(features):
    """The captions of each shape of latents."""
    store = FeatureStore.open(features)
    found = {shape: read_rows(store, shape, range(count))[2] for shape, count in store.buckets.items()}
    return {shape[1:]: sorted(indices) for shape, indices in found.items()}


def test_each_source_is_encoded_in_its_own_and_stores_grow_by_them(folders, tmp_path, capfd):
    one, two = folders
    images = [one, {"path": two, "buckets": TALL}]
    run, model = asked(images[:1], tmp_path / "f")
    assert extract(run, model, 1).store.encoded == 3
    run, model = asked(images, tmp_path / "f")
    assert open_store(run, model, None).schema.all_buckets == [(8, 8)]  # trained as it is, until it is encoded
    assert extract(run, model, 1).store.encoded == 6
    assert shapes(tmp_path / "f") == {(4, 4): [0, 1, 2], (4, 8): [4, 5], (8, 4): [3]}
    save(tmp_path / "two/x.png", "two x", gradient(32, 16))
    save(tmp_path / "one/x.png", "one x", gradient(32, 16))
    assert extract(run, model, 1).store.encoded == 8
    assert shapes(tmp_path / "f") == {(4, 4): [0, 1, 2, 6], (4, 8): [4, 5, 7], (8, 4): [3]}

    store = open_store(run, model, None)
    order, notes = plan_order(store, 2, 0, None, 0, tmp_path)
    assert sum(order.samples_of_epoch) == 8
    assert not [note for note in notes if "have no samples" in note]
    wider, _ = asked([one, {"path": two, "buckets": SMALL}], tmp_path / "f")
    with pytest.raises(UserError, match=r"data\.images\[1\] has other files now, or other settings"):
        extract(wider, model, 1)
    with pytest.raises(
        UserError, match=r"buckets 16 × 8, 8 × 16, and data\.images\[1\]\.buckets is 8 × 8; set data\.ima"
    ):
        open_store(wider, model, None)
    other, _ = asked([one, two], tmp_path / "f")
    with pytest.raises(
        UserError, match=r"buckets 16 × 8, 8 × 16, and data\.buckets is 8 × 8; set data\.buckets to \[\[16"
    ):
        open_store(other, model, None)


def test_shares_of_a_store_have_the_buckets_of_their_sources(folders, tmp_path):
    images = [{"path": folders[0], "buckets": TALL}, {"path": folders[1], "buckets": SMALL}]
    run, model = asked(images, tmp_path / "f", "data.part_size=1")
    for number in (2, 1):
        extract(run, model, 2, shard=f"{number}/2")
    assert shapes(tmp_path / "f") == {(4, 8): [1, 2], (8, 4): [0], (4, 4): [3, 4, 5]}


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [
        ("[[8, 9]]", "data.images[0].buckets: 8 × 9 does not divide by 2 (factor × patch_size); nearest: 8 × 8"),
        ("[]", "data.images.0.buckets is [], and a list of at least 1 was expected"),
        ("[8]", "data.images.0.buckets: it is a list of sizes, such as [[8, 8]]"),
        ("1024", "data.images.0.buckets: it is a list of sizes, such as [[1024, 1024]]; 1024 was found"),
        (
            "[[9, 8, 8]]",
            "buckets has 9 × 8 × 8 of videos, and fps is missing; set it to the frames per second that the",
        ),
    ],
)
def test_wrong_ones_are_a_line_with_their_key(folders, buckets, problem):
    settings = [*TINY, *SINGLE, f"data.images=[{{path: {folders[0]}, buckets: {buckets}}}]"]
    done = in_process("train", "--config", DIGITS, "--dry-run", *with_set(settings))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert problem in line


def test_only_sources_with_frames_in_theirs_read_videos(folders):
    videos = [{"path": folders[0]}, {"path": folders[1], "buckets": [[8, 8]], "mask": "file"}]
    source = opened(videos, buckets=[[9, 8, 8]], fps=8)
    assert [len(each) for each in source.sources] == [3, 3]
    with pytest.raises(
        UserError, match=r"^data\.images\[1\]\.clips is for videos, and data\.images\[1\]\.buckets has no"
    ):
        opened([videos[0], {"path": folders[1], "buckets": [[8, 8]], "clips": 2}], buckets=[[9, 8, 8]], fps=8)
