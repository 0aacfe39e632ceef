"""Loss curves on two processes beside those of one, and an overflow on one of the two. Prints a line of JSON.

FSDP2 runs with each setting, ZeRO-2 with compiled blocks.

    torchrun --nproc-per-node 2 tests/engines/fsdp2_curves.py
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from tiny_models import DEEP_FLUX, DIT, SANA

from bigdit import engines, models
from bigdit.dist import World, world_from_env
from bigdit.loader.batch import Batch
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import ModelSpec, OptimizerSpec, SegmentSpec, Strategy
from bigdit.train.step import train_step

STEPS, SAMPLES = 4, 4
ZERO2 = {"zero_optimization": {"stage": 2}}
FP8 = {"precision": "bf16", "float8": "tensorwise"}
ONE_BLOCK = SANA.model_copy(update={"kwargs": SANA.kwargs | {"num_layers": 1}})
"""To compile: a second block's graph would take each process as long again."""
FLUX = DEEP_FLUX.model_copy(update={"kwargs": DEEP_FLUX.kwargs | {"num_layers": 0, "num_single_layers": 2}})


def strategy(world_size: int, **printed: object) -> Strategy:
    engine = "single" if world_size == 1 else "fsdp2"
    fp32 = {"precision": "fp32", "micro_batch_size": SAMPLES // world_size, "optimizer": OptimizerSpec(lr=1e-2)}
    fp32["gradient_clipping"] = None
    return Strategy(**(fp32 | {"engine": engine, "world_size": world_size} | printed))


def batch(spec: ModelSpec, step: int, world: World) -> Batch:
    """This process's share of that step's global batch."""
    draw = torch.Generator().manual_seed(step)
    latents = torch.randn(SAMPLES, 4, 8, 8, generator=draw)
    text = torch.randn(SAMPLES, 6, 12, generator=draw) if spec is not DIT else None
    mask = None if text is None else torch.ones(SAMPLES, 6)
    extras = {
        DIT.name: {"class_label": torch.arange(SAMPLES)},
        FLUX.name: {"pooled_text": torch.randn(SAMPLES, 10, generator=draw)},
    }.get(spec.name, {})
    mine = slice(world.rank, SAMPLES, world.world_size)
    return Batch(
        latents[mine],
        None if text is None else text[mine],
        None if mask is None else mask[mine],
        tuple(range(10 * step, 10 * step + SAMPLES))[mine],
        {name: extra[mine] for name, extra in extras.items()},
    )


def start(spec: ModelSpec, chosen: Strategy) -> tuple[engines.Engine, models.Family]:
    family = models.family(spec.class_name)
    model = models.build(spec, device="cpu", dtype=engines.compute_dtype(chosen), seed=0)
    models.equip(model, family, chosen, backend="aot_eager")
    return engines.create(chosen, model, family, device=torch.device("cpu")), family


def curve(spec: ModelSpec, chosen: Strategy, world: World) -> list[float]:
    """The mean loss over all processes at each step."""
    engine, family = start(spec, chosen)
    if chosen.precision == "fp16":  # neither overflows here: a process's own mean is of fewer samples, and larger
        engine.scaler.scale = 1024.0
    losses = []
    for step in range(STEPS):
        loss = train_step(engine, family, FlowMatchingSpec(), [batch(spec, step, world)], lr=1e-2).loss.clone()
        if world.world_size > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(float(loss))
    return losses


def alone(spec: ModelSpec, chosen: Strategy) -> list[float]:
    """The losses of a single process, while the others wait."""
    return curve(spec, chosen, World()) if world_from_env().is_main else []


def overflow(world: World) -> dict[str, object]:
    """One process's gradients are too large for fp16. Returns whether all skip the step and halve the scale."""
    engine, family = start(SANA, strategy(2, precision="fp16", gradient_clipping=1.0))
    before = [master.detach().clone() for master in engine.masters]
    fed = batch(SANA, 0, world)
    if world.rank == 1:
        fed = Batch(fed.latents * 1e4, fed.text_embeds, fed.text_mask, fed.seeds)
    train_step(engine, family, FlowMatchingSpec(), [fed], lr=1e-2)
    same = all(torch.equal(old, master) for old, master in zip(before, engine.masters, strict=True))
    answers: list[object] = [None] * world.world_size
    dist.all_gather_object(answers, [same, engine.scaler.scale])
    return {"kept": [kept for kept, _ in answers], "scale": [scale for _, scale in answers]}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = world_from_env()
    found = {
        "single": alone(SANA, strategy(1)),
        "fsdp2": curve(SANA, strategy(2), world),
        "in_backward": curve(SANA, strategy(2, optimizer_in_backward=True), world),
        "one block": curve(ONE_BLOCK, strategy(2), world),
        "segments": curve(SANA, strategy(2, checkpointed_segments=SegmentSpec(blocks=2)), world),
        "offload": curve(SANA, strategy(2, cpu_offload=True), world),
        "zero2 compiled": curve(
            ONE_BLOCK, strategy(2, engine="deepspeed", ds_config=ZERO2, compile_blocks=True), world
        ),
        "single fp8": alone(SANA, strategy(1, **FP8)),
        "fsdp2 fp8": curve(SANA, strategy(2, **FP8), world),
        "fsdp2 fp8 offload": curve(SANA, strategy(2, cpu_offload=True, offload_activations=True, **FP8), world),
        "fsdp2 fp8 in_backward": curve(SANA, strategy(2, optimizer_in_backward=True, **FP8), world),
        "fsdp2 fp8 flux": curve(FLUX, strategy(2, **FP8), world),
        "compiled fp8 flux": curve(FLUX, strategy(2, compile_blocks=True, **FP8), world),  # its outputs are slices
        "single fp16": alone(SANA, strategy(1, precision="fp16")),
        "fsdp2 fp16": curve(SANA, strategy(2, precision="fp16"), world),
        "single dit": alone(DIT, strategy(1)),
        "fsdp2 dit": curve(DIT, strategy(2, checkpointed_blocks="all", gradient_clipping=None), world),
        "in_backward dit": curve(DIT, strategy(2, optimizer_in_backward=True), world),
        "overflow": overflow(world),
    }
    if world.is_main:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
