"""Steps on a GPU in a process of their own: `python -m bigdit.profile.measured.worker REQUEST.json RESULT.json`.

Alone, or as one of the ranks that torchrun started. With STEPS it times so many more, with BYTES torch may reserve no
more than that: by its own limit, which is all that a real card has, and under which expandable segments look for room
before a card of so many bytes would have them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bigdit import libraries
from bigdit.dist import world_from_env
from bigdit.errors import UserError, guard
from bigdit.files import write_text
from bigdit.profile.measured.run import RAN_OUT, CardRun
from bigdit.profile.request import StepRequest


def main(asked: str, answered: str, *more: str) -> None:
    """Answer the one request."""
    libraries.prepare()
    found = run(StepRequest.model_validate_json(Path(asked).read_text()), *map(int, more))
    if world_from_env().is_main:
        write_text(Path(answered), found.model_dump_json())


def run(request: StepRequest, timed_steps: int = 0, capacity_bytes: int = 0) -> CardRun:
    """Two steps on this process's device, which has nothing yet. Raises UserError where they run out of memory."""
    import torch

    from bigdit.profile.measured import steps
    from bigdit.shortage import ran_out, shortage

    device = torch.device("cuda", world_from_env().local_rank)
    if capacity_bytes:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(capacity_bytes / total, 1.0), device)
    try:
        return steps.run(request, timed_steps)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise UserError(f"{RAN_OUT}: {shortage(error, device)}") from error


if __name__ == "__main__":
    status = guard(lambda: main(*sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
