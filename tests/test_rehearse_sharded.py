"""The proof for ZeRO: a rehearsal of the first of N processes equals the record of N real ones, byte for byte.

On the CPU device and host are the same memory: what is offloaded is proved in one ledger with the rest.
"""

import json

import pytest
from conftest import ROOT
from proving import prove
from test_rehearse_proof import SHAPE
from test_rehearse_proof import TINY as THREE_BLOCKS

from bigdit.memory import ledger
from bigdit.rehearse import RehearsalRequest
from bigdit.spec import OptimizerSpec, Strategy

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
    """The record and the rehearsal of each configuration."""
    requests = [request_of(*config) for config in CONFIGS]
    return dict(zip(CONFIGS, prove(tmp_path_factory.mktemp("sharded"), requests, timeout=550), strict=True))


@pytest.mark.slow
@pytest.mark.xdist_group("sharded")  # one worker of pytest's runs all the launches, once
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config)))
def test_the_rehearsal_of_zero_is_the_real_step_to_the_byte(config, proved):
    record, answer = proved[config]
    real = ledger(record, granularity=1)
    for phase in real.phases:
        assert answer.ledger.phase(phase.phase) == phase
    assert answer.ledger == real
