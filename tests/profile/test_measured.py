"""Two steps of all ranks of a strategy under torchrun, beside the first rank's alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gpus import A40
from tiny_models import SHAPE, THREE_BLOCKS, WAN, WAN_SHAPE

from bigdit.config.strategy_text import parse_strategy
from bigdit.emulator import emulated_environment, shared_state
from bigdit.emulator.interpreter import cuda_python
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus, worker_environment
from bigdit.profile.measured import GpuRun


def run_all(asked: StepRequest, folder: Path) -> GpuRun:
    """The first rank's two steps among all, each on its own emulated GPU, with NCCL between them."""
    ranks, request, result = asked.strategy.world_size, folder / "request.json", folder / "result.json"
    request.write_text(asked.model_dump_json())
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    worker = ["-m", "bigdit.profile.measured.worker", str(request), str(result)]
    with shared_state() as state:
        alone = worker_environment(A40)
        environment = alone | emulated_environment(A40, ranks, state) | {"PYTHONPATH": alone["PYTHONPATH"]}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}  # torchrun passes -P to no rank
        command = [str(cuda_python()), "-W", "ignore", *launcher, *worker]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return GpuRun.model_validate_json(result.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    ["zero2", "fsdp2", "fsdp2,world_size=4,cp=4,cp_ring=2,checkpointed_blocks=all"],
)
def test_the_first_rank_alone_takes_what_it_takes_among_all(gpus: EmulatedGpus, given: str, tmp_path: Path) -> None:
    strategy = parse_strategy(["world_size=2,micro_batch_size=2,grad_accum_steps=2", given])
    model, batch = (WAN, WAN_SHAPE) if strategy.cp > 1 else (THREE_BLOCKS, SHAPE)
    asked = StepRequest(model=model, batch=batch, strategy=strategy)
    among_all, alone = run_all(asked, tmp_path), gpus.attempt(asked)
    assert {phase.phase: phase.allocated_bytes for phase in among_all.phases} == {
        name: found.peak_bytes for name, found in alone.phases.items()
    }
    assert alone.peak_reserved_bytes == max(each.reserved_bytes for each in among_all.phases)
