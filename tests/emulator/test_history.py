"""The history of torch's allocator as the emulation replays it, and accounts of processes as they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounts import ACCOUNT, CARD, LINE
from hypothesis import given
from hypothesis import strategies as st
from traces import CAPACITIES, MIB, ROOMY, timeline, timelines

from bigdit.emulator.account import Account, read_account
from bigdit.emulator.inside import history, phases
from bigdit.emulator.inside.replay import POINTS, Mark, Replay, thin
from bigdit.memory import Timeline
from bigdit.memory.allocator import Playback, replay
from bigdit.memory.snapshot import snapshot


def events(trace: Timeline, capacity: int = ROOMY, expandable: bool = False) -> list[dict]:
    """What torch's own history has of it: bytes that were asked for, and addresses."""
    return snapshot(trace, capacity_bytes=capacity, expandable_segments=expandable)["device_traces"][0]


@given(timelines(), CAPACITIES, st.booleans(), st.integers(0, 100))
def test_blocks_are_as_large_as_the_allocator_cuts_them(
    trace: Timeline, capacity: int, expandable: bool, cut: int
) -> None:
    """Only addresses and asked bytes are known; the totals must be the allocator's own, in one go or in two."""
    found = events(trace, capacity, expandable)
    expected = replay(trace, capacity, expandable_segments=expandable)
    followed = Replay()
    followed.feed(found[:cut])
    followed.feed(found[cut:])
    assert followed.peak.allocated_bytes == expected.peak_allocated_bytes
    assert followed.peak.reserved_bytes == expected.peak_reserved_bytes
    assert sum(tensor.nbytes for tensor in followed.at_peak) == expected.peak_allocated_bytes
    assert len(followed.ooms) == (0 if expected.fits else 1)


@given(timelines(), st.data())
def test_phases_begin_where_so_many_allocations_and_frees_were_made(trace: Timeline, data: st.DataObject) -> None:
    """A mark is told by torch's counters; what it says is allocated there must agree."""
    cut = data.draw(st.integers(0, len(trace.events)))
    playback = Playback(trace, ROOMY)
    for at in range(cut):
        playback.step(at)
    real = [event for event in trace.events[:cut] if trace.blocks[abs(event) - 1].nbytes]  # of 0 bytes: not counted
    made = sum(event > 0 for event in real)
    reserved, allocated = playback.device.reserved_bytes, playback.allocator.allocated_bytes
    followed = Replay(marks=[Mark("backward", made, len(real) - made, allocated, reserved, None)])
    followed.feed(events(trace))
    assert followed.off_bytes == 0
    highest = max(peak.allocated_bytes for peak in followed.phases.values())
    assert highest == followed.peak.allocated_bytes
    assert followed.phases["backward"].allocated_bytes >= allocated


def test_what_was_live_when_memory_ran_out() -> None:
    trace = timeline(30 * MIB, 10 * MIB, -1, 12 * MIB, 50 * MIB)
    followed = Replay()
    followed.feed(events(trace, capacity=64 * MIB))
    assert [sorted(tensor.nbytes for tensor in live) for live in followed.ooms] == [[10 * MIB, 12 * MIB]]


def test_a_curve_of_few_points_keeps_the_peaks() -> None:
    curve = [(at, at % 777, at % 1234) for at in range(100_000)]
    few = thin(curve)
    assert len(few) <= POINTS
    assert few == sorted(few)
    assert few[-1] == curve[-1]
    for column in (1, 2):
        assert max(point[column] for point in few) == max(point[column] for point in curve)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The phases that were marked, in their order."""
    found: list[str] = []
    monkeypatch.setattr(history, "mark", lambda phase, place: found.append(phase))
    yield found
    phases.forget()


def test_phases_nest_and_are_left_by_errors_too(entered: list[str]) -> None:
    phases.enter("backward")
    phases.enter("step")  # an optimizer that steps within backward
    phases.leave("step")
    phases.enter("step")  # one that fails, and is never left
    phases.leave("backward")
    assert entered == ["backward", "step", "backward", "step", "start"]


def test_a_closure_is_a_step_of_its_own(entered: list[str]) -> None:
    def closure() -> str:
        phases.enter("backward")
        phases.leave("backward")
        return "loss"

    phases.enter("step")
    assert phases.outside(closure)() == "loss"
    phases.leave("step")
    assert entered == ["step", "start", "backward", "start", "step", "start"]


def account(**changed: object) -> Account | None:
    file = Path("account.json")
    file.write_text(json.dumps(ACCOUNT | changed))
    return read_account(file)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_account_is_data_of_a_fixed_form_or_nothing() -> None:
    assert account() is not None
    for changed in (
        {"pid": -1},
        {"ended": "somehow"},
        {"cards": [CARD | {"curve": [[0, 0, 0]] * 2001}]},
        {"cards": [CARD | {"peak_reserved_bytes": "all of it"}]},
        {"command": "rm"},
        {"argv": ["x" * 10_000]},
    ):
        assert account(**changed) is None, changed
    Path("broken.json").write_text('{"pid": 1')
    assert read_account(Path("broken.json")) is None
    assert read_account(Path("absent.json")) is None


def test_a_process_that_ran_out_of_memory_fits_only_if_it_went_on() -> None:
    error = {"type": "OutOfMemoryError", "text": "CUDA out of memory", "out_of_memory": True, "frames": [LINE]}
    for fits, changed in (
        (True, {}),
        (False, {"out_of_memory_count": 1}),
        (True, {"out_of_memory_count": 3, "stepped_after_oom": True}),
        (False, {"out_of_memory_count": 1, "stepped_after_oom": True, "error": error}),
        (True, {"error": error | {"type": "ValueError", "out_of_memory": False}}),
    ):
        found = account(**changed)
        assert found is not None
        assert found.fits(ended_well=True) is fits, changed
