"""Two real training steps under a recorder, on fake tensors or on real ones: the code is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from bigdit import engines, models
from bigdit.dist import World
from bigdit.loader.batch import Batch
from bigdit.memory import Timeline
from bigdit.record import Recorder, Watch
from bigdit.spec import BatchShape, ModelSpec, ObjectiveSpec, Strategy
from bigdit.train.step import train_step

STEPS = 2  # optimizer state appears in the first one


@dataclass(frozen=True)
class Recording:
    """What was recorded on the device, and on its host: the same timeline where the device is the CPU."""

    device: Timeline
    host: Timeline
    params: int


def drive(
    spec: ModelSpec,
    shape: BatchShape,
    strategy: Strategy,
    objective: ObjectiveSpec,
    device: torch.device,
    world: World,
) -> tuple[Timeline, int]:
    """The device's part of `record`, and the model's parameter count."""
    recording = record(spec, shape, strategy, objective, device, world)
    return recording.device, recording.params


def record(
    spec: ModelSpec,
    shape: BatchShape,
    strategy: Strategy,
    objective: ObjectiveSpec,
    device: torch.device,
    world: World,
) -> Recording:
    """The record of the engine's start and two steps on `device`.

    Where the engine needs a process group, it exists already, of torch's fake backend or a real one.

    As in the trainer, the model is built on the host before the recording begins.
    """
    family = models.family(spec.class_name)
    model = models.build(spec, device="cpu", dtype=engines.compute_dtype(strategy))
    models.equip(model, family, strategy)
    extras = family.extras(model)
    params = sum(param.numel() for param in model.parameters())
    with Recorder(device.type) as recorder:
        with recorder.phase("init"):
            recorder.mark(model.parameters(), "parameter")
            recorder.mark(model.buffers(), "buffer")
            engine = engines.create(strategy, model, family, device=device, world=world)
            watch = Watch(recorder, engine)
        for _ in range(STEPS):
            micro_batches = [batch(shape, strategy, extras) for _ in range(strategy.grad_accum_steps)]
            train_step(
                engine,
                family,
                objective,
                watch.batches(micro_batches),
                lr=strategy.optimizer.lr,
                phase=watch.phase,
            )
        watch.close()
        return Recording(recorder.timeline(), recorder.host_timeline(), params)


def batch(shape: BatchShape, strategy: Strategy, extras: Mapping[str, models.Extra] = MappingProxyType({})) -> Batch:
    """A micro-batch on the host as the store gives it: latents in fp32, text in bf16."""
    count = strategy.micro_batch_size
    text = shape.text
    return Batch(
        latents=torch.zeros(count, *shape.latents),
        text_embeds=None if text is None else torch.zeros(count, *text, dtype=torch.bfloat16),
        text_mask=None if text is None else torch.ones(count, text[0], dtype=torch.bfloat16),
        seeds=tuple(range(count)),
        extras={
            name: torch.full((count, *extra.sample_shape(shape.latents)), extra.fill, dtype=extra.dtype)
            for name, extra in extras.items()
        },
    )
