"""The report of an emulation: its text, and that a script cannot change it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from accounts import ACCOUNT, GPU, LINE

from bigdit import log
from bigdit.catalog import gpu
from bigdit.emulator.emulation import EXIT_DOES_NOT_FIT, Account, EmulatedRun, Emulation
from bigdit.report.emulation import document, own_lines, page, place, show, verdict, work, write_emulation
from bigdit.units import GIB

HOSTILE = LINE | {"code": "<script>alert(1)</script> [bold red]x[/]", "name": "[link=x]<b>"}
OOM = {
    "gpu": 0, "asked_bytes": 2 * GIB, "free_bytes": GIB, "total_bytes": 44 * GIB, "allocated_bytes": 43 * GIB,
    "phase": "backward", "steps": 1, "frames": [LINE | {"own": False, "name": "inner"}, HOSTILE, LINE],
    "tensors": [{"script": HOSTILE, "library": None, "phase": "backward", "nbytes": 43 * GIB, "count": 2}],
}  # fmt: skip
LARGE = GPU | {"total_bytes": 44 * GIB, "peak_reserved_bytes": 43 * GIB, "curve": [[0, 0, 0], [1, 42 * GIB, 43 * GIB]]}


def run(*changed: dict[str, Any], status: int = 0, skipped: bool = False, **more: Any) -> EmulatedRun:
    accounts = [Account.model_validate_json(json.dumps(ACCOUNT | each)) for each in changed]
    fields = {"lost": (), "crowd": 0} | more
    return EmulatedRun(first_step_skipped=skipped, exit_status=status, seconds=1.0, accounts=tuple(accounts), **fields)


def emulation(*runs: EmulatedRun) -> Emulation:
    return Emulation(command=("python", "<i>train.py"), gpu=gpu("a40"), gpus=1, runs=runs)


def shown(found: Emulation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(log.out, "width", 80)
    show(found)
    return capsys.readouterr().out


def test_what_a_script_wrote_stays_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = emulation(run({"out_of_memory": [OOM], "out_of_memory_count": 1, "gpus": [LARGE]}, status=1))
    html = page(found)
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "<i>train.py" not in html
    text = shown(found, monkeypatch, capsys)
    assert "[bold red]x[/]" in text
    assert "[link=x]<b>" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_out_of_memory_decides_the_exit_status() -> None:
    ran_out = run({"out_of_memory": [OOM], "out_of_memory_count": 1}, status=1)
    assert emulation(ran_out).exit_status == EXIT_DOES_NOT_FIT
    assert emulation(run({}, status=9)).exit_status == 9
    assert emulation(run({})).exit_status == 0
    assert emulation(run({}), ran_out).exit_status == EXIT_DOES_NOT_FIT
    word, why = verdict(ran_out, emulation(ran_out))
    assert word == "does not fit"
    assert why == ": process 1 ran out of memory in backward: 2.00 GiB requested, 1.00 GiB free"


@pytest.mark.parametrize(
    ("changed", "status", "found"),
    [
        ({"stepped_after_oom": True}, 0, 0),
        ({"stepped_after_oom": True}, 1, 1),
        ({"steps": 0, "backwards": 0, "computed_after_oom": True}, 0, 0),  # it generates
        ({"computed_after_oom": True}, 0, 0),  # it generates after training
        ({"ended": "exec"}, 0, 0),
        ({"ended": "exec"}, 1, EXIT_DOES_NOT_FIT),
        ({"steps": 0, "backwards": 0}, 0, EXIT_DOES_NOT_FIT),  # it catches all errors and ends
        ({"steps": 0, "computed_after_oom": True}, 0, EXIT_DOES_NOT_FIT),  # it skips every step
        ({"computed_after_oom": True}, 1, EXIT_DOES_NOT_FIT),
    ],
)
def test_what_went_on_after_memory_ran_out_ended_as_its_command(
    changed: dict[str, Any], status: int, found: int
) -> None:
    ran_out = {"out_of_memory": [OOM] * 3, "out_of_memory_count": 3}
    of = emulation(run(ran_out | changed, status=status))
    assert (of.exit_status, of.fits) == (found, {0: True, 1: None, EXIT_DOES_NOT_FIT: False}[found])
    if found == 0:
        word, why = verdict(of.runs[0], of)
        assert word == "ended well"
        assert why.startswith(", although memory ran out 3 times: the process needs ")


@pytest.mark.parametrize("status", [1, 2, 7, 139])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_command_that_failed_gives_no_answer(
    status: int, processes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text, page and JSON agree, and the status is not that of what does not fit."""
    found = emulation(run(*[{"steps": 0}] * processes, status=status))
    reported = document(found)
    (of_run,) = reported["runs"]
    assert [reported["fits"], of_run["fits"], *(each["fits"] for each in of_run["accounts"])] == [None] * (
        2 + processes
    )
    assert reported["verdict"] == of_run["verdict"] == "no answer"
    ended = "ended by signal 11" if status == 139 else f"ended with status {status}"
    assert reported["reason"].startswith(f"the command was {ended}" if status == 139 else f"the command {ended}")
    assert f"no answer: {reported['reason']}" in " ".join(shown(found, monkeypatch, capsys).split())
    assert f"<strong>no answer</strong> <span>{reported['reason']}</span>" in page(found)
    assert (reported["exit_status"], of_run["exit_status"]) == (1 if status == 2 else status, status)


def test_a_page_says_first_that_memory_ran_out_on_the_way() -> None:
    of = emulation(run({"out_of_memory": [OOM], "out_of_memory_count": 1, "stepped_after_oom": True}))
    assert "<strong>ended well</strong> <span>although memory ran out once: the process needs" in page(of)


def test_a_process_of_a_command_that_failed_is_not_reported_to_have_ended_well() -> None:
    assert "<td>normally</td>" in page(emulation(run({})))
    failed = page(emulation(run({}, status=9)))
    assert "<td>by itself</td>" in failed
    assert "<td>normally</td>" not in failed


def test_a_traceback_is_the_scripts_own_lines_from_outside_in() -> None:
    (oom,) = run({"out_of_memory": [OOM], "out_of_memory_count": 1}).accounts[0].out_of_memory
    assert [line.name for line in own_lines(oom)] == ["<module>", "[link=x]<b>", "inner"]


def test_notices_are_reported_once() -> None:
    printed = {"text": "read what is not there", "count": 2, "place": LINE}
    other = {"text": "only then", "count": 1, "place": None}
    runs = (
        run({"notices": [printed], "rank": 0}, {"notices": [printed], "rank": 1, "pid": 2}, lost=(7,), crowd=2),
        run({"notices": [printed, other]}, skipped=True),
    )
    lines = emulation(*runs).notices
    assert "read what is not there (rank 0 and 1 more, 4 times, first at train.py:3)" in lines
    assert "with the first step skipped, only then (process 1)" in lines
    assert sum("read what is not there" in line for line in lines) == 1
    assert any("process 7" in line and "left no account" in line for line in lines)
    assert any("started 2 processes on fewer GPUs" in line for line in lines)
    assert "2 processes used GPU 0, and shared its memory" in lines


def test_gpus_of_several_machines_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = emulation(run({"rank": 0}, {"rank": 1, "node": 1})).model_copy(update={"nodes": 2})
    for text in (shown(found, monkeypatch, capsys), page(found)):
        assert "0 of machine 1" in text
        assert "0 of machine 2" in text


def test_no_gpu_is_no_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = emulation(run())
    printed = shown(found, monkeypatch, capsys)
    assert "no process used a GPU" in " ".join(printed.split())
    assert "\n\n\n" not in printed
    assert verdict(found.runs[0], found)[0] == "no answer"


def test_work_is_the_median_of_the_steps_after_the_first() -> None:
    steps = [{"launches": 900}, {"launches": 10}, {"launches": 12}, {"launches": 11}]
    assert work(run({"work_by_step": steps}).accounts[0]) == {"launches": 11}
    assert work(run({"work_by_step": steps[:1]}).accounts[0]) == {"launches": 900}


def test_places_are_short() -> None:
    line = run({"notices": [{"text": "x", "count": 1, "place": LINE}]}).accounts[0].notices[0].place
    assert place(line) == "train.py:3"
    assert line is not None
    deep = line.model_copy(update={"file": "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py"})
    assert place(deep) == "torch/…/linear.py:3"


def test_the_folder_has_both_runs(tmp_path: Path) -> None:
    found = emulation(run({"gpus": [LARGE]}), run({"gpus": [LARGE], "skipped_steps": 1}, skipped=True))
    written = write_emulation(found, tmp_path / "out")
    assert [file.name for file in written] == ["report.html", "report.json"]
    assert json.loads(written[1].read_text()) == json.loads(json.dumps(document(found)))
    html = written[0].read_text()
    assert "first step skipped by the loss scaler" in html
    assert len(re.findall(r"<svg", html)) == 2
    assert not re.search(r"(src|href)=\"(?!#)|@import", html)
