"""Real training by DeepSpeed on two processes: offload to CPU memory changes nothing."""

import json

import pytest
import torch
from two_processes import run_two
from zero import TINY, strategy_of

from bigdit.errors import UserError
from bigdit.strategy import Strategy

# One launch trains the tiny model with every requested setting.
_TRAIN = """
import gc, json, sys
import torch, torch.distributed as dist
from bigdit import engines, models
from bigdit.dist import world_from_env
from bigdit.engines.deepspeed import forget
from bigdit.loader.batch import Batch
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import ModelSpec, Strategy
from bigdit.train.step import train_step

def batches(strategy, rank, step):
    draw = torch.Generator().manual_seed(100 * step + rank)
    for i in range(strategy.grad_accum_steps):
        yield Batch(
            latents=torch.randn(2, 4, 8, 8, generator=draw),
            text_embeds=torch.randn(2, 6, 12, generator=draw),
            text_mask=torch.ones(2, 6),
            seeds=tuple(1000 * step + 100 * rank + 10 * i + j for j in range(2)),
        )

def curve(spec, strategy, world):
    torch.manual_seed(0)
    family = models.family(spec.class_name)
    model = models.build(spec, device="cpu", dtype=engines.compute_dtype(strategy))
    models.equip(model, family, strategy)
    engine = engines.create(strategy, model, family, device=torch.device("cpu"))
    losses = []
    for step in range(3):
        result = train_step(engine, family, FlowMatchingSpec(), list(batches(strategy, world.rank, step)), lr=1e-3)
        dist.all_reduce(result.loss)
        losses.append(float(result.loss) / world.world_size)
    engine.model.destroy()
    forget()
    return losses

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = world_from_env()
asked = json.load(open(sys.argv[1]))
spec = ModelSpec.model_validate(asked["model"])
curves = []
for value in asked["strategies"]:
    curves.append(curve(spec, Strategy.model_validate(value), world))
    gc.collect()
if world.is_main:
    json.dump(curves, open(sys.argv[2], "w"))
dist.destroy_process_group()
"""

WAYS = [
    (engine, precision, optimizer, grad_accum)
    for precision, optimizer, grad_accum in (("fp32", "adamw", 2), ("bf16", "adamw", 1), ("fp32", "adamw_8bit", 1))
    for engine in ("zero2", "zero2-optimizer", "zero3", "zero3-optimizer", "zero3-param")
]
# A recomputed block gathers weights that none of its modules has, before its backward pass.
SEGMENTS = ("zero3-segments", "fp32", "adamw", 2)
# To clip by the norm, the CPU sums squares in another order: fp32's last digits, a few steps later.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    script, asked, answered = (folder / name for name in ("train.py", "asked.json", "curves.json"))
    script.write_text(_TRAIN)
    strategies = [
        strategy_of(engine, 2, precision, optimizer, 0, grad_accum).model_dump(mode="json")
        for engine, precision, optimizer, grad_accum in WAYS
    ]
    _, precision, optimizer, grad_accum = SEGMENTS
    strategies.append(strategy_of("zero3", 2, precision, optimizer, "all", grad_accum).model_dump(mode="json"))
    strategies[-1]["checkpointed_segments"] = {"blocks": 2}
    strategies[-1]["ds_config"]["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    asked.write_text(json.dumps({"model": TINY.model_dump(mode="json"), "strategies": strategies}))
    run_two(script, asked, answered)
    return dict(zip((*WAYS, SEGMENTS), json.loads(answered.read_text()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [way for way in (*WAYS, SEGMENTS) if "-" in way[0]], ids=lambda way: "-".join(map(str, way))
)
def test_what_is_offloaded_learns_the_same(curves, way):
    engine, *rest = way
    plain = curves[(engine.partition("-")[0], *rest)]
    assert len(set(plain)) == 3
    assert curves[way] == pytest.approx(plain, rel=TOLERANCE)


def test_a_section_that_deepspeed_refuses_is_one_line():
    from torch import nn

    from bigdit.engines.deepspeed import DeepSpeedEngine

    document = {"train_micro_batch_size_per_gpu": 1, "csv_monitor": {"enable": True}}
    strategy = Strategy(engine="deepspeed", precision="fp32", ds_config=document)
    with pytest.raises(UserError, match=r"^strategy\.ds_config: DeepSpeed rejects it: .*enable"):
        DeepSpeedEngine(strategy, nn.Linear(1, 1), device=torch.device("cpu"))
