"""Two real training steps under a recorder, on fake tensors or on real ones: the code is the same."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bigdit import engines, models
from bigdit.catalog.encoders import OnlineEncoders
from bigdit.dist import World
from bigdit.loader.batch import Batch
from bigdit.loader.raw import RawBatch
from bigdit.memory import Timeline
from bigdit.record import Recorder, Watch
from bigdit.rehearse.data import batch, feed, raw_batch
from bigdit.rehearse.kernels import known_answers
from bigdit.rehearse.reads import named_in_errors
from bigdit.rehearse.scratch import scratch_of
from bigdit.spec import BatchShape, ModelSpec, ObjectiveSpec, Strategy
from bigdit.train.encode import encode
from bigdit.train.step import train_step

if TYPE_CHECKING:
    from bigdit.features.encoders.frozen import FrozenEncoders

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
    encoders: OnlineEncoders | None = None,
) -> Recording:
    """The record of the engine's start and two steps on `device`, with `encoders` where features are online.

    Where the engine needs a process group, it exists already, of torch's fake backend or a real one.

    As in the trainer, the model and the encoders are built on the host before the recording begins.
    """
    family = models.family(spec.class_name)
    model = models.build(spec, device="cpu", dtype=engines.compute_dtype(strategy))
    models.equip(model, family, strategy)
    extras = family.extras(model)
    params = sum(param.numel() for param in model.parameters())
    frozen = None if encoders is None else _frozen(encoders)

    def make() -> Batch | RawBatch:
        if encoders is None:
            return batch(shape, strategy, extras)
        return raw_batch(encoders, shape, strategy, extras)

    recorder = Recorder(device.type, scratch_of(device), known_answers())
    with recorder, named_in_errors(spec.name, recorder):
        with recorder.phase("init"):
            recorder.mark(model.parameters(), "parameter")
            recorder.mark(model.buffers(), "buffer")
            recorder.mark([] if frozen is None else frozen.tensors(), "encoder")
            engine = engines.create(strategy, model, family, device=device, world=world)
            ema = engines.ema_of(engine)
            watch = Watch(recorder, engine, ema)
            encoding = None
            if frozen is not None:
                frozen.to(device)
                recorder.mark(frozen.tensors(), "encoder")
                encoding = watch.encoding(functools.partial(encode, frozen, strategy.encode_chunk))
            steps = feed(make, strategy, pin=device.type != "cpu", seen=watch.host_batch)
        for _ in range(STEPS):
            micro_batches = next(steps)
            train_step(
                engine,
                family,
                objective,
                watch.batches(micro_batches),
                lr=strategy.optimizer.lr,
                ema=ema,
                phase=watch.phase,
                encode=encoding,
            )
            del micro_batches  # before the next ones are read, as the trainer does
        watch.close()
        return Recording(recorder.timeline(), recorder.host_timeline(), params)


def _frozen(encoders: OnlineEncoders) -> FrozenEncoders:
    from bigdit.features.encoders.frozen import FrozenEncoders  # transformers takes seconds to import

    return FrozenEncoders(encoders)
