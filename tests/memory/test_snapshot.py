"""Snapshots: what torch's own tools for its memory snapshots make of ours."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz
from traces import CAPACITIES, MIB, timeline, timelines

from bigdit.errors import UserError
from bigdit.memory import Block, Span, Timeline
from bigdit.memory.allocator import replay
from bigdit.memory.snapshot import snapshot, write_snapshot

STEP = Timeline(
    (
        Block(5 * MIB, "parameter", "blocks.0.attn"),
        Block(3 * MIB, "saved activation", "blocks.0.ff", 1),
        Block(1000, "gradient", "aten.mm"),
    ),
    (1, 2, 3, -2),
    (Span("init", 0, 1), Span("forward", 1, 4)),
)


def written(trace: Timeline, folder: Path, **options) -> dict:
    write_snapshot(trace, folder / "snapshot.pickle", **options)
    return pickle.loads((folder / "snapshot.pickle").read_bytes())


def shown_by(html: str) -> dict:
    """The snapshot that a page of torch's carries."""
    files = json.loads(re.search(r"const local_files = (.*)", html)[1])
    return pickle.loads(base64.b64decode(files[0]["base64"]))


def test_torchs_pages_and_reports_take_the_file(tmp_path: Path) -> None:
    found = written(STEP, tmp_path)
    assert shown_by(_memory_viz.trace_plot(found)) == found
    assert shown_by(_memory_viz.segment_plot(found)) == found
    # Two segments of 20 MiB, one with 5 MiB in it, and one of 2 MiB with 1000 bytes.
    report = _memory_viz.segsum(found)
    assert "segments: 3" in report
    assert "total_reserved: 42.0MiB" in report
    assert "total_allocated: 5.0MiB" in report
    text = _memory_viz.trace(found)
    assert text.count("cudaMalloc") == 3
    assert re.search(r"seg_0\[0:5.0MiB\]|\w = \w\[0:5.0MiB\]", text)
    kept = _memory_viz.filter_alloc_free_pairs(written(STEP, tmp_path))["device_traces"][0]
    assert [entry["size"] for entry in kept if entry["action"] == "alloc"] == [5 * MIB, 1000]


# The opcodes that torch/utils/viz/MemoryViz.js knows; it stops at any other.
READ_BY_THE_PAGE = """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_DICT EMPTY_LIST EMPTY_TUPLE LIST DICT
    TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE
    NEWFALSE SHORT_BINUNICODE BINUNICODE
"""


def test_the_page_can_read_the_pickle(tmp_path: Path) -> None:
    for expandable in (False, True):
        write_snapshot(STEP, tmp_path / "snapshot.pickle", expandable_segments=expandable)
        used = list(pickletools.genops((tmp_path / "snapshot.pickle").read_bytes()))
        assert {opcode.name for opcode, _, _ in used} <= set(READ_BY_THE_PAGE.split())
        assert max(value for opcode, value, _ in used if opcode.name == "LONG1") < 2**53  # a JavaScript number
    # It shows categories if it finds a block without one among them.
    categories = {entry["category"] for entry in written(STEP, tmp_path)["device_traces"][0]}
    assert categories == {"parameter", "saved activation", "gradient", "unknown"}


def test_frames_name_category_label_and_phase(tmp_path: Path) -> None:
    found = written(STEP, tmp_path)
    allocations = [entry for entry in found["device_traces"][0] if entry["action"] == "alloc"]
    assert [_memory_viz._frames_fmt(entry["frames"]) for entry in allocations] == [
        ["parameter:0:blocks.0.attn", "phase:0:init"],
        ["saved activation:0:blocks.0.ff", "phase:0:forward"],
        ["gradient:0:aten.mm", "phase:0:forward"],
    ]
    assert [entry["time_us"] for entry in allocations] == [0, 1, 2]
    assert [entry["action"] for entry in found["device_traces"][0]][-2:] == ["free_requested", "free_completed"]
    large, other_stream, small = found["segments"]
    assert [part["state"] for part in large["blocks"]] == ["active_allocated", "inactive"]
    assert large["blocks"][0]["frames"] == allocations[0]["frames"]
    assert (other_stream["stream"], other_stream["allocated_size"]) == (1, 0)
    assert (small["segment_type"], small["requested_size"], small["allocated_size"]) == ("small", 1000, 1024)


def test_a_timeline_that_runs_out_of_memory_ends_there(tmp_path: Path) -> None:
    found = written(timeline(30 * MIB, 20 * MIB, -1), tmp_path, capacity_bytes=45 * MIB)
    last = found["device_traces"][0][-1]
    assert (last["action"], last["size"], last["device_free"]) == ("oom", 20 * MIB, 15 * MIB)
    assert "raise OutOfMemoryError # 20.0MiB requested, 15.0MiB free in CUDA" in _memory_viz.trace(found)


def pages(address: int, nbytes: int) -> set[int]:
    """All segments are multiples of 2 MiB."""
    assert address % (2 * MIB) == nbytes % (2 * MIB) == 0
    return set(range(address // (2 * MIB), (address + nbytes) // (2 * MIB)))


@given(timelines(), CAPACITIES, st.booleans())
def test_the_trace_leads_from_an_empty_card_to_the_segments(trace: Timeline, capacity: int, expandable: bool) -> None:
    """The page goes back in time from the segments: so the trace must come to them."""
    found = snapshot(trace, capacity_bytes=capacity, expandable_segments=expandable)
    live: dict[int, int] = {}
    mapped: set[int] = set()
    highest = 0
    for entry in found["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
        elif entry["action"] in ("segment_alloc", "segment_map"):
            assert mapped.isdisjoint(pages(entry["addr"], entry["size"]))
            mapped |= pages(entry["addr"], entry["size"])
        elif entry["action"] in ("segment_free", "segment_unmap"):
            assert mapped >= pages(entry["addr"], entry["size"])
            mapped -= pages(entry["addr"], entry["size"])
        highest = max(highest, len(mapped) * 2 * MIB)
    in_use = {
        part["address"]: part["requested_size"]
        for segment in found["segments"]
        for part in segment["blocks"]
        if part["state"] == "active_allocated"
    }
    assert in_use == live
    assert set().union(*(pages(segment["address"], segment["total_size"]) for segment in found["segments"])) == mapped
    assert sum(segment["total_size"] for segment in found["segments"]) == len(mapped) * 2 * MIB
    assert highest == replay(trace, capacity, expandable_segments=expandable).peak_reserved_bytes
    for segment in found["segments"]:
        at = segment["address"]
        for part in segment["blocks"]:
            assert part["address"] == at
            at += part["size"]


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*snapshot\.pickle: File exists"):
        write_snapshot(STEP, tmp_path / "file" / "snapshot.pickle")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
