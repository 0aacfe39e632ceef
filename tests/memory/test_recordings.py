"""What real allocators did, replayed: recordings of benchmarks/record_allocator.py in tests/measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROOT
from record_allocator import Recording, made_up_trace
from traces import MIB, ROOMY, timeline

from bigdit.memory.allocator import replay

MEASURED = ROOT / "tests/measured"


def by_hand() -> Recording:
    """A recording in the format of real ones, its figures computed by hand: no card made it."""
    trace = timeline(20 * MIB, MIB, -1, 30 * MIB, -2, 5 * MIB, phases=(("init", 0), ("step", 3)))
    return Recording(
        gpu="none: computed by hand",
        driver="none",
        versions={},
        expandable_segments=False,
        capacity_bytes=45 * MIB,
        packed_timeline=trace.pack(),
        # 20 and 2 MiB; for 30 the 20 are given back; for the last 5 a segment of 20 is wanted, and 30 + 20 > 45
        # even when the 2 are given back.
        reserved_changes=((0, 20 * MIB), (1, 22 * MIB), (3, 32 * MIB), (5, 30 * MIB)),
        memory_stats={
            "allocated_bytes.all.peak": 31 * MIB,
            "reserved_bytes.all.peak": 32 * MIB,
            "num_alloc_retries": 2,
            "num_ooms": 1,
        },
        failed_event=5,
    )


@pytest.mark.parametrize("name", ["by hand", *sorted(file.name for file in MEASURED.glob("*.json"))])
def test_a_recorded_trace_replays_to_what_the_real_allocator_did(name: str, tmp_path: Path) -> None:
    """Recordings from real cards lie in tests/measured; the first case goes the same way without one."""
    file = MEASURED / name
    if name == "by hand":
        file = tmp_path / "by-hand.json"
        file.write_text(by_hand().model_dump_json())
    recorded = Recording.model_validate_json(file.read_text())
    assert recorded.differences() == []


def test_a_recording_that_the_replay_does_not_meet_says_where() -> None:
    real = by_hand()
    changes = ((0, 20 * MIB), (1, 24 * MIB), *real.reserved_changes[2:])
    stats = real.memory_stats | {"num_alloc_retries": 1}
    wrong = real.model_copy(update={"reserved_changes": changes, "memory_stats": stats, "failed_event": None})
    assert wrong.differences() == [
        "the failed event: measured None, replayed 5",
        "cache flushes: measured 1, replayed 2",
        f"reserved bytes: measured {(1, 24 * MIB)}, replayed {(1, 22 * MIB)}",
    ]
    short = real.model_copy(update={"reserved_changes": real.reserved_changes[:3]})
    assert short.differences() == [f"reserved bytes: measured (), replayed {((5, 30 * MIB),)}"]


def test_traces_for_recording_exercise_what_a_card_without_room_does() -> None:
    trace = made_up_trace(1, blocks=600)
    roomy = replay(trace, ROOMY)
    tight = replay(trace, roomy.peak_reserved_bytes * 4 // 5)
    assert tight.cache_flushes > 0
    assert {block.stream for block in trace.blocks} == {0, 1, 2}
    assert replay(trace, ROOMY, expandable_segments=True).fits
