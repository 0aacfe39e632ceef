"""DeepSpeed's ZeRO strategies for a tiny model."""

import json

from commands import ROOT
from tiny_models import THREE_BLOCKS

from bigdit.strategy import OptimizerSpec, Strategy

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


def strategy_of(engine, processes, precision, optimizer, checkpointed, grad_accum, decayed="all"):
    document = json.loads((ROOT / "ds_configs/zero2_bf16.json").read_text())
    # Buckets smaller than the model, so that it takes several. Not all parameters are kept whole.
    document["zero_optimization"] |= ENGINES[engine] | {
        "reduce_bucket_size": 50000,
        "allgather_bucket_size": 50000,
        "stage3_param_persistence_threshold": 1000,
        "stage3_prefetch_bucket_size": 20000,
    }
    document |= {
        "fp16": {"initial_scale_power": 4},  # no step overflows or is skipped
    }
    return Strategy(
        engine="deepspeed",
        world_size=processes,
        micro_batch_size=MICRO_BATCH_SIZE,
        grad_accum_steps=grad_accum,
        precision=precision,
        optimizer=OptimizerSpec(name=optimizer, decayed=decayed),
        checkpointed_blocks=checkpointed,
        gradient_clipping=1.0,
        ds_config=document,
    )
