"""Every engine decays matrices and nothing else, on two processes, however it shards and flattens them."""

import pytest
from two_processes import answer_of_two

_GROUPS = """
import json, sys
import torch, torch.distributed as dist
from resuming import started, strategy
from whole import full_weights
from bigdit.dist import World, world_from_env
from bigdit.strategy import OptimizerSpec

LR, DECAY = 1e-3, 5.0

def weights(world, engine, name, decay, steps=1):
    optimizer = OptimizerSpec(name=name, lr=LR, weight_decay=decay, decayed="matrices")
    engine, _, step, _ = started(strategy(*engine, ema=None, optimizer=optimizer), world)
    for _ in range(steps):
        step()
    found = full_weights(engine)
    if hasattr(engine.model, "destroy"):
        from bigdit.engines.deepspeed import forget
        forget(engine)
    return found

def shares(world, engine, name):
    '''Of each parameter's elements, what a step with decay has taken beyond one without, in lr x decay x weight.'''
    without, decayed = (weights(world, engine, name, decay) for decay in (0.0, DECAY))
    return {key: ((without[key] - decayed[key]) / (LR * DECAY * start[key])).nanmedian().item() for key in start}

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = world_from_env()
ENGINES = {"fsdp2": ("fsdp2", 2), **{f"zero{stage}": ("deepspeed", 2, stage) for stage in range(4)}}
start = weights(World(), (), "adamw", 0.0, steps=0)
answer = {name: shares(world, engine, "adamw") for name, engine in ENGINES.items()}
answer |= {f"{name}, 8-bit": shares(world, ENGINES[name], "adamw_8bit") for name in ("zero2", "zero3")}
answer |= {f"{name}, in blocks": shares(world, ENGINES[name], "adamw_8bit_ao") for name in ("fsdp2",)}
answer["single"] = shares(World(), (), "adamw")
if world.is_main:
    json.dump(answer, open(sys.argv[1], "w"))
dist.destroy_process_group()
"""
WAYS = ("single", "fsdp2", "zero0", "zero1", "zero2", "zero3", "zero2, 8-bit", "zero3, 8-bit", "fsdp2, in blocks")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return answer_of_two(_GROUPS, tmp_path_factory.mktemp("groups"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_decay_takes_its_share_of_matrices_and_of_nothing_else(found, way):
    """Decay is decoupled: two steps with the same gradients and weights differ by it alone."""
    decayed = {name for name, share in found[way].items() if share == pytest.approx(1, rel=1e-2)}
    kept = {name for name, share in found[way].items() if abs(share) < 1e-2}
    assert decayed | kept == found[way].keys()
    assert {"patch_embed.proj.weight", "transformer_blocks.1.attn1.to_q.weight"} <= decayed
    assert {"patch_embed.proj.bias", "scale_shift_table", "caption_norm.weight"} <= kept
    assert decayed == {name for name, share in found["single"].items() if share > 0.5}
