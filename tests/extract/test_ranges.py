"""Which ranges an extraction takes, which others hold, and who is known to be dead."""

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigdit.errors import UserError
from bigdit.extract.extract import parse_split, split
from bigdit.store import schema as schema_module
from bigdit.store.growth import begin_growth, commit_growth, latest_schema
from bigdit.store.lease import FOLDER, WorkerName, all_leases, all_marks, missing, own_folder, pull, remove_left
from bigdit.store.part import part_path
from bigdit.store.schema import StoreSchema, claim, read_schema


def schema_of(*counts, part_size=4, **more):
    sources = [{"kind": "folder", "count": count, "digest": f"d{number}"} for number, count in enumerate(counts)]
    return StoreSchema(
        codec={"name": "identity", "sides": [1, 2]},
        text_encoder={"dim": 8, "max_tokens": 4},
        buckets=[(8, 8)],
        sources=sources,
        part_size=part_size,
        **more,
    )


counts = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@given(counts, st.integers(1, 20))
def test_ranges_tile_every_source_and_span_no_two(sizes, part_size):
    schema = schema_of(*sizes, part_size=part_size)
    ranges = schema.ranges()
    assert [index for start, end in ranges for index in range(start, end)] == list(range(sum(sizes)))
    assert all(0 < end - start <= part_size for start, end in ranges)
    ends = {sum(sizes[: number + 1]) for number in range(len(sizes))}
    assert ends <= {end for _, end in ranges}
    assert schema.count == sum(sizes)


@given(counts, st.integers(1, 20), st.data())
def test_any_cover_by_splits_does_every_unit_once(sizes, part_size, data):
    schema = schema_of(*sizes, part_size=part_size)
    cuts = sorted(data.draw(st.lists(st.integers(0, schema.count), max_size=6)))
    bounds = [0, *cuts, schema.count]
    taken = [each for start, end in pairwise(bounds) for each in split(schema.ranges(), start, end)]
    assert taken == schema.ranges()


@given(st.integers(1, 1000), st.integers(1, 50))
def test_shards_cover_what_there_is(count, n):
    shards = [parse_split(count, None, None, f"{k}/{n}") for k in range(1, n + 1)]
    assert [index for start, end in shards for index in range(start, end)] == list(range(count))


def test_splits_by_index():
    assert parse_split(10, None, None, None) == (0, 10)
    assert parse_split(10, 3, None, None) == (3, 10)
    assert parse_split(10, None, 4, None) == (0, 4)
    assert parse_split(10, 3, 99, None) == (3, 99)  # more than there is: the rest


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((3, None, "1/2"), "--shard cannot be combined with --start-index or --end-index"),
        ((None, None, "0/4"), "--shard: 0/4 is not k/n with k from 1 to n, such as 1/4 to 4/4"),
        ((None, None, "5/4"), "--shard: 5/4 is not k/n with k from 1 to n, such as 1/4 to 4/4"),
        ((None, None, "two"), "--shard: two is not k/n with k from 1 to n, such as 1/4 to 4/4"),
        ((7, 7, None), "--end-index: 7 must be greater than --start-index, which is 7"),
        ((-1, 7, None), "--start-index: -1 is out of range; the sources hold 0 to 9"),
        ((12, None, None), "--start-index: 12 is out of range; the sources hold 0 to 9"),
    ],
)
def test_a_split_that_names_nothing_is_refused(arguments, problem):
    with pytest.raises(UserError) as error:
        parse_split(10, *arguments)
    assert error.value.problems == (problem,)


def commit(root, each):
    part_path(root, *each).touch()


def test_pull_gives_what_is_missing_once(tmp_path):
    ranges = schema_of(50, 23).ranges()
    commit(tmp_path, ranges[3])
    pulled = list(pull(tmp_path, ranges, random.Random(0)))
    assert sorted(pulled) == [each for each in ranges if each != ranges[3]]
    assert missing(tmp_path, ranges) == sorted(pulled)
    assert missing(tmp_path / "nowhere", ranges) == ranges


def test_pull_passes_over_what_others_commit_meanwhile(tmp_path):
    ranges, pulled = schema_of(200).ranges(), []
    for each in pull(tmp_path, ranges, random.Random(1)):
        pulled.append(each)
        commit(tmp_path, each)
        left = missing(tmp_path, ranges)
        if left:  # another extraction is as fast
            commit(tmp_path, left[-1])
    assert missing(tmp_path, ranges) == []
    assert len(pulled) == len(ranges) // 2


def test_pull_takes_what_others_have_in_hand_last(tmp_path):
    ranges = schema_of(40).ranges()
    with own_folder(tmp_path) as folder:
        for each in ranges[2:5]:
            (folder / part_path(tmp_path, *each).name).touch()
        pulled = list(pull(tmp_path, ranges, random.Random(2)))
    assert sorted(pulled) == ranges
    assert sorted(pulled[-3:]) == ranges[2:5]


def test_two_that_pull_interleaved_do_no_unit_twice(tmp_path):
    ranges = schema_of(400).ranges()
    pullers = [pull(tmp_path, ranges, random.Random(seed)) for seed in (1, 2)]
    done = []
    while pullers:
        for puller in list(pullers):
            each = next(puller, None)
            if each is None:
                pullers.remove(puller)
            else:
                done.append(each)
                commit(tmp_path, each)
    assert sorted(done) == ranges


def test_a_name_tells_its_process():
    worker = WorkerName.here()
    assert WorkerName.parse(str(worker)) == worker
    odd = replace(worker, host="a_b.c-d_")
    assert WorkerName.parse(str(odd)) == odd
    assert WorkerName.parse("slurm") is None
    assert WorkerName.parse("a_b_c_d_e_f") is None
    assert worker.fate() == "alive"


def test_only_the_kernel_says_who_is_dead():
    me = WorkerName.here()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    worker = replace(me, pid=child.pid, started=ticks)
    assert worker.fate() == "alive"
    assert replace(worker, started=ticks + 1).fate() == "dead"  # another process with this id
    assert replace(worker, host="elsewhere").fate() == "unknown"
    assert replace(worker, boot="0" * 12).fate() == "unknown"
    assert replace(worker, space="1").fate() == "unknown"  # ids of another container
    child.kill()
    until = time.monotonic() + 10
    while worker.fate() == "alive" and time.monotonic() < until:
        time.sleep(0.01)
    assert worker.fate() == "dead"  # its parent has not waited for it: a zombie writes nothing
    child.wait()
    assert worker.fate() == "dead"


def left_by(root, worker, mark):
    folder = root / FOLDER / str(worker)
    folder.mkdir(parents=True)
    (folder / mark).write_bytes(b"half")
    return folder


def test_what_the_dead_left_is_removed_whatever_the_clock_says(tmp_path):
    me = WorkerName.here()
    dead = left_by(tmp_path, replace(me, started=me.started - 1), "part-a")
    alive = left_by(tmp_path, me, "part-b")
    gone = left_by(tmp_path, replace(me, host="node7"), "part-c")
    for folder, moment in ((dead, 4102444800), (alive, 315532800), (gone, 315532800)):
        os.utime(folder, (moment, moment))
        os.utime(next(folder.iterdir()), (moment, moment))
    assert all_marks(tmp_path) == {"part-a", "part-b", "part-c"}
    assert [lease.folder for lease in remove_left(tmp_path)] == [dead]
    assert {lease.folder: (lease.fate, lease.marks, lease.nbytes) for lease in all_leases(tmp_path)} == {
        alive: ("alive", ("part-b",), 4),
        gone: ("unknown", ("part-c",), 4),
    }
    assert [lease.folder for lease in remove_left(tmp_path, other_machines=True)] == [gone]
    assert [lease.folder for lease in all_leases(tmp_path)] == [alive]
    assert all_leases(tmp_path / "nowhere") == []


def test_of_two_that_grow_a_store_at_once_the_second_is_refused(tmp_path):
    claim(tmp_path, schema_of(10))
    found = read_schema(tmp_path)
    begin_growth(tmp_path, found, found)
    assert latest_schema(tmp_path) == found
    grown, other = (schema_of(10, count).model_copy(update={"buckets": found.buckets}) for count in (5, 6))
    begin_growth(tmp_path, found, grown)
    begin_growth(tmp_path, found, grown)  # it found the same
    with pytest.raises(UserError, match=r"another extraction found other changes for .* just now; run this again"):
        begin_growth(tmp_path, found, other)
    assert (latest_schema(tmp_path), read_schema(tmp_path)) == (grown, found)
    assert grown.ranges() == [(0, 4), (4, 8), (8, 10), (10, 14), (14, 15)]
    commit_growth(tmp_path, grown)
    assert read_schema(tmp_path) == grown
    with pytest.raises(UserError, match=r"part_size is 4 there and 5 in this run"):
        claim(tmp_path, schema_of(10, 5, part_size=5))
    assert all_leases(tmp_path) == []


def test_of_two_that_claim_at_once_the_second_is_refused(tmp_path, monkeypatch):
    """The other one's schema appears between this one's check and its write."""
    looked = schema_module.read_schema
    looks = []

    def look(root):
        found = looked(root)
        if not looks:
            looks.append(found)
            claim(tmp_path, schema_of(10, part_size=3))
        return found

    monkeypatch.setattr(schema_module, "read_schema", look)
    with pytest.raises(UserError, match="part_size is 3 there and 4 in this run"):
        claim(tmp_path, schema_of(10))
    assert looks == [None]
    assert looked(tmp_path).part_size == 3
