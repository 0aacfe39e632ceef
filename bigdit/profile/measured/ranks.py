"""Steps of all ranks of a strategy, started by torchrun, each on an emulated card of its own, with NCCL between them.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

from bigdit.catalog import Gpu
from bigdit.emulator import shared_state
from bigdit.emulator.interpreter import cuda_python
from bigdit.errors import UserError
from bigdit.profile.cards import worker_environment
from bigdit.profile.lanes import failure
from bigdit.profile.measured.run import CardRun
from bigdit.profile.request import StepRequest


def run_ranks(
    gpu: Gpu, request: StepRequest, timeout_s: float = 300.0, *, expandable_segments: bool = False
) -> CardRun:
    """The first rank's two steps of `request`, among all ranks of its strategy.

    Raises UserError where they take longer, and for what the user can mend; WorkerError where a rank dies.
    """
    ranks = request.strategy.world_size
    # torchrun hands -P on to no rank: the variable does what own_module does
    with tempfile.TemporaryDirectory(prefix="bigdit-ranks-") as folder, shared_state() as state:
        asked, answered = (Path(folder) / name for name in ("request.json", "result.json"))
        asked.write_text(request.model_dump_json())
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        worker = ["-m", "bigdit.profile.measured.worker", str(asked), str(answered)]
        process = subprocess.Popen(
            [str(cuda_python()), "-W", "ignore", *launcher, *worker],
            env=worker_environment(gpu, ranks, state, expandable_segments=expandable_segments)
            | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"two steps of {request.model.name} by {ranks} processes on emulated cards of {gpu.name} took more "
                f"than {timeout_s:g} s"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which are sessions of their own
                process.wait()
        if not answered.exists():
            raise failure(f"{request.model.name} on an emulated card", process.returncode, said.splitlines())
        return CardRun.model_validate_json(answered.read_bytes())
