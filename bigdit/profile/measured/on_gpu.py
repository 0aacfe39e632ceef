"""Steps on the CUDA card that this machine has, each question in a process of its own. Nothing here imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import bigdit
from bigdit.checkout import own_module
from bigdit.errors import UserError
from bigdit.profile.lanes import failure
from bigdit.profile.measured.run import CardRun, told
from bigdit.profile.request import StepRequest

_ROOT = Path(bigdit.__file__).parent.parent


def run_on_card(
    request: StepRequest, capacity_bytes: int, steps: int, expandable_segments: bool, timeout_s: float = 600.0
) -> CardRun:
    """Two steps of `request`, and `steps` more that are timed, where torch may reserve `capacity_bytes` (0: all).

    Raises RanOut where the card is too small, UserError where they take longer, and for what the user can mend;
    WorkerError where the process dies.
    """
    what = f"{request.model.name} on this machine's card"
    with tempfile.TemporaryDirectory(prefix="bigdit-card-") as folder:
        asked, answered = (Path(folder) / name for name in ("request.json", "result.json"))
        asked.write_text(request.model_dump_json())
        given = [str(each) for each in (asked, answered, steps, capacity_bytes)]
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", *own_module("bigdit.profile.measured.worker"), *given],
                env=_environment(expandable_segments),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"two steps of {what} took more than {timeout_s:g} s") from None
        if not answered.exists():
            raise told(failure(what, done.returncode, done.stderr.splitlines()))
        return CardRun.model_validate_json(answered.read_bytes())


def _environment(expandable_segments: bool) -> dict[str, str]:
    """No network, no place in a launched group, and the allocator as it was asked for."""
    own = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    own.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    paths = os.pathsep.join(filter(None, (str(_ROOT), own.get("PYTHONPATH"))))
    allocator = f"expandable_segments:{expandable_segments}"
    return own | {"PYTORCH_ALLOC_CONF": allocator, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
