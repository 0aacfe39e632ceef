"""Two steps on this machine's GPU, each job in its own process: torch's counters by phase, and seconds.

This file imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from bigdit.errors import UserError
from bigdit.processes import ROOT, own_module
from bigdit.profile.attempt import StepRequest
from bigdit.profile.pool import environment, failure
from bigdit.strategy import Strict
from bigdit.train.record import PhaseMemory

RAN_OUT = "two steps ran out of the GPU's memory"
"""The beginning of a worker's message."""

TIMEOUT_S = 600.0


class RanOut(UserError):
    """Two steps took more than the GPU has."""


class Spent(Strict):
    """Calls of an operator, or runs of a kernel, in one step, and the seconds of its kernels."""

    count: PositiveInt
    seconds: NonNegativeFloat


class Timing(Strict):
    """Timed steps after the first two on a real GPU, and one more under torch's profiler.

    `seconds_per_step` is their mean. The CPU had launched everything after `host_seconds_per_step`.
    """

    steps: PositiveInt
    seconds_per_step: NonNegativeFloat
    host_seconds_per_step: NonNegativeFloat
    operators: dict[str, Spent]
    kernels: dict[str, Spent]


class GpuRun(Strict):
    """Two steps on a CUDA device.

    `non_torch_bytes`: GPU memory of the process outside torch's allocator; None if it is not known.
    """

    device: str
    params: PositiveInt
    phases: tuple[PhaseMemory, ...]
    alloc_retries: NonNegativeInt
    non_torch_bytes: NonNegativeInt | None
    timing: Timing | None
    versions: dict[str, str]


def run_on_gpu(request: StepRequest, capacity_bytes: int, steps: int, expandable_segments: bool) -> GpuRun:
    """Two steps of `request`, and `steps` more that are timed. torch may reserve `capacity_bytes` (0: all).

    Raises RanOut, UserError for a timeout and errors that the user can fix, and WorkerError if the process dies.
    """
    what = f"{request.model.name} on this machine's GPU"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="bigdit-gpu-") as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(request.model_dump_json())
        given = [str(each) for each in (asked, answered, steps, capacity_bytes)]
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", *own_module("bigdit.profile.measured.worker"), *given],
                env=environment(expandable_segments=expandable_segments) | {"PYTHONPATH": path},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"two steps of {what} took more than {TIMEOUT_S:g} s") from None
        if answered.exists():
            return GpuRun.model_validate_json(answered.read_bytes())
    error = failure(what, done.returncode, done.stderr.splitlines())
    if isinstance(error, UserError) and error.problems[0].startswith(RAN_OUT):
        raise RanOut(*error.problems)
    raise error
