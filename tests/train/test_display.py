"""What a run shows: updated in place on a terminal, plain lines elsewhere, and no unknown figure."""

import json
import os
import pty
import subprocess
import sys

import pytest
import torch
from commands import BIN, DIGITS, HELPERS, ROOT, SINGLE, TINY, environment_with, with_set

from bigdit.checkpoint import Peers
from bigdit.train.measure import host_now
from bigdit.train.monitor import metrics
from bigdit.train.monitor.metrics import Display, Metrics, figures
from bigdit.train.step import StepResult
from bigdit.units import GIB

ROW = {
    "step": 12,
    "loss": 0.123456,
    "grad_norm": 0.51234,
    "lr": 1e-4,
    "samples_per_second": 310.4,
    "mfu": 0.4123,
    "memory_bytes": 20 * GIB,
    "peak_memory_bytes": 22 * GIB,
    "planned_memory_bytes": 24 * GIB,
    "seconds_left": 754.4,
}


def test_all_figures_of_a_step_are_on_a_line():
    assert figures(ROW) == (
        "loss 0.1235 · lr 1.00e-04 · norm 0.512 · 310 samples/s · MFU 41.2 % · 20.00 GiB now, 22.00 GiB peak, "
        "24.00 GiB planned · 0:12:34 left"
    )


def test_what_is_not_known_is_left_out():
    known = {key: value for key, value in ROW.items() if key not in ("mfu", "memory_bytes", "planned_memory_bytes")}
    slow = known | {"grad_norm": None, "loss": None, "samples_per_second": 0.4321}
    validated = slow | {"validation_loss": 0.34567, "ema_validation_loss": None}
    assert "loss – · lr 1.00e-04 · validation 0.3457 · 0.43 samples/s" in figures(validated)
    assert figures(slow) == "loss – · lr 1.00e-04 · 0.43 samples/s · 22.00 GiB peak · 0:12:34 left"


def test_a_pipe_gets_a_line_a_minute_and_the_last_one(capfd, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    with Display(0, 900, shown=True) as shown:
        for step in range(1, 600, 10):
            now[0] += 2.0
            shown.show(ROW | {"step": step})
    text = capfd.readouterr().err
    assert "\x1b" not in text
    assert [line.split(" · ")[0] for line in text.splitlines()] == ["step 291/900", "step 591/900"]
    with Display(0, 900, shown=True) as shown:
        shown.show(ROW)
    assert capfd.readouterr().err == f"step 12/900 · {figures(ROW)}\n"


def test_other_processes_show_nothing(capfd):
    with Display(0, 900, shown=False) as shown:
        shown.show(ROW)
    assert capfd.readouterr().err == ""


_SHOW = f"""
from bigdit import libraries
libraries.prepare()
with libraries.importing():
    from bigdit.train.monitor.metrics import Display
with Display(0, 900, shown=True) as shown:
    for step in (10, 20):
        shown.show({ROW!r} | {{"step": step}})
"""


def on_a_terminal(**variables):
    """What a terminal of 160 columns receives."""
    ours, theirs = pty.openpty()
    environment = environment_with({"TERM": "xterm", "COLUMNS": "160", "PYTHONPATH": HELPERS} | variables)
    environment = {name: value for name, value in environment.items() if name != "NO_COLOR" or name in variables}
    done = subprocess.run([sys.executable, "-c", _SHOW], stdout=theirs, stderr=theirs, env=environment, timeout=120)
    os.close(theirs)
    assert done.returncode == 0
    text = b""
    while True:
        try:
            text += os.read(ours, 1 << 16)
        except OSError:  # all output has been read
            break
    os.close(ours)
    return text.decode()


def test_a_terminal_has_the_figures_in_place():
    text = on_a_terminal()
    assert "\x1b[?25l" in text  # the cursor is hidden, and shown again
    assert "\x1b[?25h" in text
    assert "20/900" in text
    assert figures(ROW) in text


def test_without_colours_a_terminal_gets_lines_and_no_control_code():
    assert on_a_terminal(NO_COLOR="1") == f"step 20/900 · {figures(ROW)}\r\n"


class Half:
    """Steps with half the FLOPs that the GPU could do in a second."""

    peak = 1e12

    def flops(self, micro_batches):
        return 5e11


def written(output, **options):
    """The rows of metrics.jsonl after two steps."""
    reported = {"images": 4, "name_samples": str, "memory": host_now}
    with Metrics(output, Peers(), torch.device("cpu"), start=0, stop=2, **reported, **options) as metrics:
        for step in (1, 2):
            metrics.add(step, 1e-3, StepResult(torch.tensor(1.0), torch.tensor(0.5), taken=True))
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_rows_have_what_is_shown(tmp_path):
    rows = written(tmp_path, planned_bytes=7 * GIB, mfu=Half())
    for row in rows:
        assert row["planned_memory_bytes"] == 7 * GIB
        assert 0 < row["memory_bytes"] <= row["peak_memory_bytes"]
        # Four images a step: the rate says how many steps a second ran, each with half a second's FLOPs.
        assert row["mfu"] == pytest.approx(0.5 * row["samples_per_second"] / 4)


def test_rows_of_a_cpu_without_a_plan_have_neither_mfu_nor_plan(tmp_path):
    for row in written(tmp_path):
        assert row.keys() == {
            *("step", "loss", "grad_norm", "lr", "samples_per_second", "memory_bytes", "peak_memory_bytes")
        }


@pytest.mark.slow
def test_a_run_in_a_pipe_ends_with_its_last_step(features, tmp_path):
    chosen = with_set([*TINY, *SINGLE, f"data.features={features}", f"output={tmp_path}"])
    command = [str(part) for part in (BIN / "python", "-m", "bigdit.train", "--config", DIGITS, *chosen)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_with({}), timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("step "))
    assert line.startswith("step 8/8 · loss ")
    assert line.endswith(" peak · 0:00:00 left")
    assert "MFU" not in line
