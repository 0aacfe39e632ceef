"""Validation by several engines on two processes beside one. Writes each one's findings, and what it left, as JSON.

torchrun --nproc-per-node 2 tests/train/validation_losses.py STORE ANSWER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resuming import strategy
from stores import DIM
from tiny_models import SANA

from bigdit import checkpoint, engines, models
from bigdit.config.run import ValidationConfig
from bigdit.dist import World, world_from_env
from bigdit.engines.deepspeed import forget
from bigdit.engines.state import state_slices
from bigdit.loader.order import Order, ValidationSplit
from bigdit.loader.stream import FeatureStream
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.store import FeatureStore
from bigdit.train.monitor.monitor import Validation
from bigdit.train.step import train_step

SPEC = SANA.model_copy(update={"kwargs": SANA.kwargs | {"caption_channels": DIM}})
SAMPLES, HELD, STEPS = 2, 7, 3  # of two buckets; two processes' micro-batches do not fill them


def validated(store: FeatureStore, world: World, *, every: int = 1, **printed: object) -> list[dict[str, Any]]:
    """A row a step: the training loss, the validation when it is due, and whether validation changed anything."""
    micro = SAMPLES // world.world_size
    chosen, family = (
        strategy(world_size=world.world_size, micro_batch_size=micro, **printed),
        models.family(SPEC.class_name),
    )
    model = models.build(SPEC, device="cpu", dtype=engines.compute_dtype(chosen), seed=0)
    engine = engines.create(chosen, models.equip(model, family, chosen), family, device=torch.device("cpu"))
    ema, peers = engines.ema_of(engine), checkpoint.Peers(world)
    held = ValidationSplit(store.index, len(store.index.parts), HELD)
    order = Order(store.index.counts, store.index.shapes, SAMPLES, 0, validation=held)
    stream = FeatureStream(store, world, order, micro_batch_size=micro, grad_accum_steps=1, seed=0, caption_dropout=0.1)
    config = ValidationConfig(samples=HELD, every=every, times=(0.2, 0.8))
    validation = Validation(config, store, held, peers, engine, ema, family, FlowMatchingSpec(), 99)
    rows = []
    for step in range(STEPS):
        result = train_step(engine, family, FlowMatchingSpec(), stream.micro_batches(step), lr=1e-2, ema=ema)
        before = {name: place.tensor.clone() for name, place in state_slices(engine, ema, world.rank).items()}
        drawn = torch.get_rng_state()
        found = validation.measure() if validation.due(step + 1) else {}
        kept = all(
            torch.equal(before[name], place.tensor) for name, place in state_slices(engine, ema, world.rank).items()
        )
        kept &= torch.equal(drawn, torch.get_rng_state())
        each = peers.gather((float(result.loss), kept))
        rows.append({"loss": sum(loss for loss, _ in each) / len(each), "kept": all(kept for _, kept in each)} | found)
    if chosen.engine == "deepspeed":
        forget(engine)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, alone, store = world_from_env(), World(), FeatureStore.open(Path(sys.argv[1]))
    fsdp2, zero = {"engine": "fsdp2"}, {"engine": "deepspeed"}
    found = {
        "single": validated(store, alone),
        "single, not measured": validated(store, alone, every=99),
        "fsdp2": validated(store, world, **fsdp2),
        "fsdp2, not measured": validated(store, world, **fsdp2, every=99),
        "fsdp2 kept": validated(store, world, **fsdp2, reshard_after_forward=False),
        "fsdp2 sr": validated(store, world, **fsdp2, precision="bf16_sr"),
        "zero0": validated(store, world, **zero, stage=0),
        "zero2": validated(store, world, **zero, stage=2),
        "zero3": validated(store, world, **zero, stage=3),
        "zero3, not measured": validated(store, world, **zero, stage=3, every=99),
    }
    if world.is_main:
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
