"""The proof for ZeRO: a rehearsal of the first of N processes equals the record of N real ones, byte for byte."""

import json
import subprocess
import sys

import pytest
from conftest import BIN, ROOT, run_command
from test_rehearse_proof import SHAPE, TINY

from bigdit.memory import Timeline, ledger
from bigdit.rehearse import Rehearsal, RehearsalRequest
from bigdit.spec import OptimizerSpec, Strategy

MICRO_BATCH_SIZE = 2

# (stage, processes, precision, optimizer, checkpointed blocks, accumulation)
CONFIGS = [
    (0, 2, "bf16", "adamw", 0, 1),
    (1, 2, "bf16", "adamw", 1, 2),
    (2, 2, "bf16", "adamw", 0, 1),
    (2, 2, "bf16", "adamw_8bit", "all", 2),
    (2, 4, "fp32", "adamw", 1, 2),
    (3, 2, "bf16", "adamw", 0, 2),
    (3, 4, "fp32", "adamw_8bit", "all", 1),
]

# What N real processes run over gloo. gloo's own thread lets go of a collective's tensors a moment after the
# collective ended, and waits for the interpreter's lock to do it: it is given that moment, for without it the
# record has the few bytes of an overflow flag now sooner, now later.
_REAL = """
import json, sys, time
import torch, torch.distributed as dist
from bigdit.rehearse import RehearsalRequest
from bigdit.rehearse.drive import drive
from bigdit.dist import world_from_env

def unhurried(collective):
    def call(*args, **kwargs):
        work = collective(*args, **kwargs)
        time.sleep(0.002)
        return work
    return call

for name in ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
    setattr(dist, name, unhurried(getattr(dist, name)))
torch.set_num_threads(1)
dist.init_process_group("gloo")
world = world_from_env()
request = RehearsalRequest.model_validate_json(open(sys.argv[1]).read())
timeline, _ = drive(request.model, request.batch, request.strategy, request.objective, torch.device("cpu"), world)
if world.is_main:
    open(sys.argv[2], "w").write(timeline.pack())
dist.destroy_process_group()
"""


def request_of(stage, processes, precision, optimizer, checkpointed, grad_accum):
    document = json.loads((ROOT / "ds_configs/zero2_bf16.json").read_text())
    # buckets smaller than the model, so that it takes several
    document["zero_optimization"] |= {"stage": stage, "reduce_bucket_size": 50000, "allgather_bucket_size": 50000}
    document |= {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": grad_accum,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "zero_allow_untested_optimizer": True,
    }
    strategy = Strategy(
        engine="deepspeed",
        world_size=processes,
        micro_batch_size=MICRO_BATCH_SIZE,
        grad_accum_steps=grad_accum,
        precision=precision,
        optimizer=OptimizerSpec(name=optimizer),
        checkpointed_blocks=checkpointed,
        gradient_clipping=1.0,
        ds_config=document,
    )
    return RehearsalRequest(
        model=TINY, batch=SHAPE, strategy=strategy, micro_batch_sizes=(MICRO_BATCH_SIZE,), kernels="cpu"
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config)))
def test_the_rehearsal_of_zero_is_the_real_step_to_the_byte(config, tmp_path):
    request = request_of(*config)
    asked, script, recorded = (tmp_path / name for name in ("request.json", "real.py", "real.timeline"))
    asked.write_text(request.model_dump_json())
    script.write_text(_REAL)
    done = run_command(
        *(BIN / "torchrun", "--standalone", "--nproc-per-node", config[1], script, asked, recorded),
        PYTHONPATH=str(ROOT),
        DS_ACCELERATOR="cpu",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answered = tmp_path / "answer.json"
    subprocess.run([sys.executable, "-m", "bigdit.rehearse.worker", asked, answered], check=True, timeout=300, cwd=ROOT)
    rehearsed = Rehearsal.model_validate_json(answered.read_text()).size(MICRO_BATCH_SIZE)

    real = ledger(Timeline.unpack(recorded.read_text()), granularity=1)
    for phase in real.phases:
        assert rehearsed.ledger.phase(phase.phase) == phase
    assert rehearsed.ledger == real
