"""Steps on a GPU in their own process: `bigdit.profile.measured.worker REQUEST.json RESULT.json [STEPS [BYTES]]`.

It runs alone, or as one of the ranks that torchrun started. It times STEPS more steps. BYTES limit what torch may
reserve, by torch's own limit. With it, expandable segments free caches earlier than on a GPU of so many bytes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bigdit import libraries
from bigdit.dist import world_from_env
from bigdit.errors import UserError, guard
from bigdit.files import write_text
from bigdit.profile.attempt import StepRequest
from bigdit.profile.measured import RAN_OUT


def main(asked: str, answered: str, timed_steps: str = "0", capacity_bytes: str = "0") -> None:
    """Answer the one request. Raises UserError where memory runs out."""
    libraries.prepare()
    import torch

    from bigdit.profile.measured.steps import run
    from bigdit.shortage import ran_out, shortage

    device = torch.device("cuda", world_from_env().local_rank)
    if capacity := int(capacity_bytes):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(capacity / total, 1.0), device)
    try:
        found = run(StepRequest.model_validate_json(Path(asked).read_text()), int(timed_steps))
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise UserError(f"{RAN_OUT}: {shortage(error, device)}") from error
    if world_from_env().is_main:
        write_text(Path(answered), found.model_dump_json())


if __name__ == "__main__":
    status = guard(lambda: main(*sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
