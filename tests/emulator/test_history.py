"""The emulator's replay of the history of torch's allocator, and the accounts of processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounts import ACCOUNT, GPU, LINE
from gpus import answers

from bigdit.emulator.emulation import Account, read_account
from bigdit.emulator.inside import history, steps
from bigdit.emulator.inside.replay import POINTS, Mark, Replay, thin

_TRACES = """
import json, random, sys, torch
from bigdit_emulated.libraries import limit
streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
stats = torch.cuda.memory_stats

def counted():
    names = ("allocation.all.allocated", "allocation.all.freed", "allocated_bytes.all.current",
             "reserved_bytes.all.current")
    return [stats()[name] for name in names]

def in_use():
    parts = [part for segment in torch.cuda.memory_snapshot() for part in segment["blocks"]]
    return sorted(part["size"] for part in parts if part["state"] == "active_allocated")

def trace(seed):
    draw, live, ooms = random.Random(seed), [], []
    torch.cuda.empty_cache()
    limit((200 if seed % 2 else 4000) << 20)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history("all", "alloc", "python", max_entries=sys.maxsize, clear_history=True)
    before, mark, end = counted(), None, draw.randrange(20, 120)
    for at in range(end):
        if at == end // 2:
            mark = counted()
        if live and draw.random() < 0.4:
            del live[draw.randrange(len(live))]
            continue
        nbytes = draw.randrange(1, draw.choice([4 << 10, 2 << 20, 60 << 20]))
        with torch.cuda.stream(draw.choice(streams)):
            try:
                live.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                ooms.append(in_use())
    peaks = [stats()[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved")]
    (found,) = torch.cuda.memory._snapshot()["device_traces"]
    mark = [mark[0] - before[0], mark[1] - before[1], *mark[2:]]
    return {"events": found, "peaks": peaks, "mark": mark, "ooms": ooms}

print(json.dumps([trace(seed) for seed in range(30)]))
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_are_as_large_as_the_allocator_cuts_them(expandable: bool) -> None:
    """Only addresses and requested bytes are known. The totals must equal the allocator's own, in one go or in two."""
    found = answers("a40", _TRACES, PYTORCH_ALLOC_CONF=f"expandable_segments:{expandable}")
    assert sum(len(each["ooms"]) for each in found) > 10
    for seed, each in enumerate(found):
        allocations, frees, allocated, reserved = each["mark"]
        followed = Replay(marks=[Mark("backward", allocations, frees, allocated, reserved, None)])
        followed.feed(each["events"][: 7 * seed])
        followed.feed(each["events"][7 * seed :])
        assert [followed.peak.allocated_bytes, followed.peak.reserved_bytes] == each["peaks"]
        assert sum(tensor.nbytes for tensor in followed.at_peak) == followed.peak.allocated_bytes
        assert [sorted(tensor.nbytes for tensor in live) for live in followed.ooms] == each["ooms"]
        assert followed.off_bytes == 0
        assert max(peak.allocated_bytes for peak in followed.phases.values()) == followed.peak.allocated_bytes
        assert followed.phases["backward"].allocated_bytes >= allocated


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
    """The phases that were marked, in order."""
    found: list[str] = []
    monkeypatch.setattr(history, "mark", lambda phase, place: found.append(phase))
    yield found
    steps.forget()


def test_phases_nest_and_are_left_by_errors_too(entered: list[str]) -> None:
    steps.enter("backward")
    steps.enter("step")  # an optimizer that steps within backward
    steps.leave("step")
    steps.enter("step")  # a phase that fails, and never ends
    steps.leave("backward")
    assert entered == ["backward", "step", "backward", "step", "start"]


def test_a_closure_is_a_step_of_its_own(entered: list[str]) -> None:
    def closure() -> str:
        steps.enter("backward")
        steps.leave("backward")
        return "loss"

    steps.enter("step")
    assert steps.outside(closure)() == "loss"
    steps.leave("step")
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
        {"gpus": [GPU | {"curve": [[0, 0, 0]] * 2001}]},
        {"gpus": [GPU | {"peak_reserved_bytes": "all of it"}]},
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
