"""A ControlNet trains on two processes as on one, under each engine: some of its weights never have a gradient."""

import pytest
from two_processes import answer_of_two

_CURVES = """
import dataclasses, json, sys
import torch, torch.distributed as dist
from tiny_pipelines import SD3
from whole import full_weights
from bigdit import engines, models
from bigdit.config.strategy_text import PRESETS
from bigdit.dist import World, world_from_env
from bigdit.loader.batch import Batch
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import ControlNetSpec, ModelSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = world_from_env()
SPEC = ModelSpec(name="tiny", class_name="SD3Transformer2DModel", kwargs=SD3 | {"num_layers": 3})


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda *shape: torch.randn(2, *shape, generator=generator)
    extras = {"pooled_text": drawn(12), "reference": drawn(1, 4, 8, 8)}
    return Batch(drawn(4, 8, 8), drawn(5, 16), torch.ones(2, 5), (seed + 1, seed + 2), extras)


def trained(world, preset, **more):
    count = world.world_size
    shared = {"controlnet": ControlNetSpec(layers=2), "optimizer": OptimizerSpec(lr=1e-2, eps=1e-3)}
    shared |= {"precision": "fp32", "ema": {"decay": 0.9}, "micro_batch_size": 2}
    shared |= {"world_size": count, "grad_accum_steps": 2 // count}
    strategy, family = Strategy(**PRESETS[preset] | shared | more), models.family(SPEC.class_name)
    model = models.build(SPEC, device="cpu", dtype=engines.compute_dtype(strategy), seed=0)
    models.equip(model, family, strategy, backend="aot_eager")
    frozen = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("controlnet."))
    engine = engines.create(strategy, model, family, device=torch.device("cpu"))
    ema, losses = engines.ema_of(engine), []
    for step in range(4):
        both = [batch(10 * step + number) for number in range(2)]
        mine = both if count == 1 else [both[world.rank]]
        loss = train_step(engine, family, FlowMatchingSpec(), mine, lr=1e-2, ema=ema).loss.clone()
        if count > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(float(loss))
    found = losses, full_weights(engine), full_weights(engine, ema)
    if strategy.engine == "deepspeed":
        from bigdit.engines.deepspeed import forget
        forget(engine)
    return found


def compare(preset, **more):
    found = trained(world, preset, **more)
    away = [max(float((mine[n] - same[n]).abs().max()) for n in same) for mine, same in zip(found[1:], alone[1:])]
    names = [set(mine) == set(same) for mine, same in zip(found[1:], alone[1:])]
    return {"losses": found[0], "away": away, "names": names}


alone = trained(World(), "single")
ways = {
    "ddp": {},
    "fsdp2": {"checkpointed_blocks": "all"},
    "fsdp2-offload": {},
    "zero1": {},
    "zero2": {"checkpointed_blocks": "all"},
    "zero3": {"checkpointed_blocks": 2},
}
found = {preset: compare(preset, **more) for preset, more in ways.items()}
int8 = {"controlnet": ControlNetSpec(layers=2, base="int8"), "checkpointed_blocks": "all"}
quantised, *_ = trained(World(), "single", **int8)
for preset, more in (("ddp", {"blocks_to_swap": 3}), ("fsdp2", {})):
    losses, *_ = trained(world, preset, **int8 | more)
    found[f"{preset} int8"] = {"losses": losses}
found["swapped"] = compare("ddp", checkpointed_blocks="all", blocks_to_swap=3)
found["compiled"] = compare("fsdp2", checkpointed_blocks="all", compile_blocks=True)
fp8 = [trained(on, preset, precision="bf16", float8="tensorwise")[0]
       for on, preset in ((World(), "single"), (world, "fsdp2"))]
if world.is_main:
    json.dump({"alone": alone[0], "quantised": quantised, "fp8": fp8, **found}, open(sys.argv[1], "w"))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_one_as_one_process_does(tmp_path):
    answer = answer_of_two(_CURVES, tmp_path)
    alone, quantised, (fp8, fp8_of_two) = (answer.pop(name) for name in ("alone", "quantised", "fp8"))
    assert quantised[-1] != alone[-1] != alone[0]
    assert fp8_of_two == pytest.approx(fp8, rel=1e-3)  # bf16
    for preset in ("ddp int8", "fsdp2 int8"):
        assert answer.pop(preset)["losses"] == pytest.approx(quantised, rel=2e-5), preset
    for name, found in answer.items():
        assert found["losses"] == pytest.approx(alone, rel=2e-5), name
        assert found["names"] == [True, True], name
        assert max(found["away"]) < 1e-4, name
