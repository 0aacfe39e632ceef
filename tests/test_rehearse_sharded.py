"""The proof for ZeRO: a rehearsal of the first of N processes equals the record of N real ones, byte for byte.

On the CPU device and host are the same memory: what is offloaded is proved in one ledger with the rest.
"""

import json
import os
import subprocess
import sys

import pytest
from conftest import BIN, ROOT, run_command
from test_rehearse_proof import SHAPE
from test_rehearse_proof import TINY as THREE_BLOCKS

from bigdit.memory import Timeline, ledger
from bigdit.rehearse import RehearsalRequest, RehearsedSize
from bigdit.spec import OptimizerSpec, Strategy

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MICRO_BATCH_SIZE = 2
TINY = THREE_BLOCKS.model_copy(update={"kwargs": THREE_BLOCKS.kwargs | {"num_layers": 2}})

OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
PARAM = {"offload_param": {"device": "cpu"}}
ENGINES = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2-optimizer": {"stage": 2, **OPTIMIZER},
    "zero3-optimizer": {"stage": 3, **OPTIMIZER},
    "zero3-param": {"stage": 3, **OPTIMIZER, **PARAM},
}
OPTIMIZERS = ("adamw", "adamw_8bit", "came")
CHECKPOINTED = (0, 1, "all")


def _configs():
    """(engine, processes, precision, optimizer, checkpointed blocks, accumulation), on two processes every engine
    with every optimizer and every checkpointing; precision and accumulation by turns. A part of them on four
    processes, and a part in fp16."""
    for i, engine in enumerate(ENGINES):
        for j, optimizer in enumerate(OPTIMIZERS):
            for k, checkpointed in enumerate(CHECKPOINTED):
                yield engine, 2, ("bf16", "fp32")[(i + j + k) % 2], optimizer, checkpointed, 1 + (i + k) % 2
        yield engine, 4, ("fp32", "bf16")[i % 2], OPTIMIZERS[i % 3], CHECKPOINTED[i % 3], 1 + i % 2
    for engine in ("zero0", "zero2", "zero3", "zero2-optimizer"):
        yield engine, 2, "fp16", "adamw", 1, 2


CONFIGS = list(_configs())

# DeepSpeed asks for a processor that is made for fp16; others compute it too.
_FP16 = """
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
CPU_Accelerator.is_fp16_supported = lambda self: True
"""

# What N real processes run over gloo. gloo's own thread lets go of a collective's tensors a moment after the
# collective ended, and waits for the interpreter's lock to do it: it is given that moment, for without it the
# record has the few bytes of an overflow flag now sooner, now later.
_REAL = (
    _FP16
    + """
import gc, json, sys, time
import torch, torch.distributed as dist
from bigdit.rehearse import RehearsalRequest
from bigdit.rehearse.drive import drive
from bigdit.dist import world_from_env
from bigdit.engines.deepspeed import forget

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
requests = [RehearsalRequest.model_validate(value) for value in json.load(open(sys.argv[1]))]
answers = []
for request in requests:
    timeline, _ = drive(request.model, request.batch, request.strategy, request.objective, torch.device("cpu"), world)
    answers.append(timeline.pack())
    forget()
    gc.collect()
if world.is_main:
    json.dump(answers, open(sys.argv[2], "w"))
dist.destroy_process_group()
"""
)

_REHEARSED = (
    """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
"""
    + _FP16
    + """
import json, sys
from bigdit.rehearse import RehearsalRequest
from bigdit.rehearse.worker import rehearse_size
requests = [RehearsalRequest.model_validate(value) for value in json.load(open(sys.argv[1]))]
answers = [rehearse_size(request, request.micro_batch_sizes[0]).model_dump(mode="json") for request in requests]
json.dump(answers, open(sys.argv[2], "w"))
"""
)


def request_of(engine, processes, precision, optimizer, checkpointed, grad_accum):
    document = json.loads((ROOT / "ds_configs/zero2_bf16.json").read_text())
    # Buckets smaller than the model, so that it takes several; and parameters that are not all kept whole.
    document["zero_optimization"] |= ENGINES[engine] | {
        "reduce_bucket_size": 50000,
        "allgather_bucket_size": 50000,
        "stage3_param_persistence_threshold": 1000,
        "stage3_prefetch_bucket_size": 20000,
    }
    document |= {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": grad_accum,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 4},  # no step overflows, and is skipped
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
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


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """The record and the rehearsal of each configuration: a launch for each number of processes, one rehearsing."""
    folder = tmp_path_factory.mktemp("sharded")
    answered, log = folder / "answers.json", folder / "rehearsed.log"
    command = [sys.executable, "-c", _REHEARSED, _asked(folder / "asked.json", CONFIGS), answered]
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | ONE_THREAD, stdout=sink, stderr=sink)
    try:
        real = _real(folder, 2) | _real(folder, 4)
        assert process.wait(timeout=500) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    answers = [RehearsedSize.model_validate(value) for value in json.loads(answered.read_text())]
    return {config: (real[config], answer) for config, answer in zip(CONFIGS, answers, strict=True)}


def _real(folder, processes):
    configs = [config for config in CONFIGS if config[1] == processes]
    asked, recorded = _asked(folder / f"asked{processes}.json", configs), folder / f"real{processes}.json"
    script = folder / "real.py"
    script.write_text(_REAL)
    done = run_command(
        *(BIN / "torchrun", "--standalone", "--nproc-per-node", processes, script, asked, recorded),
        PYTHONPATH=str(ROOT),
        DS_ACCELERATOR="cpu",
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(configs, map(Timeline.unpack, json.loads(recorded.read_text())), strict=True))


def _asked(file, configs):
    file.write_text(json.dumps([request_of(*config).model_dump(mode="json") for config in configs]))
    return file


@pytest.mark.slow
@pytest.mark.xdist_group("sharded")  # one worker of pytest's runs all the launches, once
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config)))
def test_the_rehearsal_of_zero_is_the_real_step_to_the_byte(config, proved):
    record, answer = proved[config]
    real = ledger(record, granularity=1)
    for phase in real.phases:
        assert answer.ledger.phase(phase.phase) == phase
    assert answer.ledger == real
