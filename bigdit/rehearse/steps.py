"""The one description of what is rehearsed: a model on the host, an engine that takes it, and two training steps.

The recorder watches it on fake tensors and on a real CPU (`drive.py`), the allocator's own trace on a card
(`card/steps.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bigdit import engines, models
from bigdit.catalog.encoders import OnlineEncoders
from bigdit.dist import World
from bigdit.engines import Ema, Engine
from bigdit.loader.batch import Batch
from bigdit.loader.raw import RawBatch
from bigdit.models import Family
from bigdit.objective_spec import ObjectiveSpec
from bigdit.rehearse.data import batch, feed, raw_batch
from bigdit.spec import BatchShape, ModelSpec, Strategy
from bigdit.train.encode import Encode, encode
from bigdit.train.step import train_step

if TYPE_CHECKING:
    from bigdit.encoders.frozen import FrozenEncoders

STEPS = 2  # optimizer state appears in the first one


@dataclass(frozen=True)
class Workload:
    """A model on the host, with what the strategy adds to it, its frozen encoders, and what feeds it."""

    model: nn.Module
    family: Family
    strategy: Strategy
    frozen: FrozenEncoders | None
    make: Callable[[], Batch | RawBatch]
    params: int


def prepare(spec: ModelSpec, shape: BatchShape, strategy: Strategy, encoders: OnlineEncoders | None) -> Workload:
    """As in the trainer, the model and the encoders are built on the host before anything is recorded."""
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

    return Workload(model, family, strategy, frozen, make, params)


class Witness:
    """What is told of two steps as they run: this one does not listen."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surrounds init, and the phases of `train_step`."""
        yield

    def built(self, model: nn.Module, frozen: FrozenEncoders | None) -> None:
        """In init, before the engine takes the model."""

    def started(self, engine: Engine, ema: Ema | None) -> None:
        """In init, when the engine has the model."""

    def moved(self, frozen: FrozenEncoders) -> None:
        """In init, when the encoders are on the device."""

    def held(self, batch: Any) -> None:
        """The loader holds a micro-batch, for this step or a later one."""

    def batches(self, micro_batches: Sequence[Any]) -> Sequence[Any]:
        """What the step is given for these micro-batches."""
        return micro_batches

    def encoding(self, encode: Encode) -> Encode:
        """What encodes in place of `encode`."""
        return encode


def two_steps(
    workload: Workload, objective: ObjectiveSpec, device: torch.device, world: World, witness: Witness
) -> None:
    """The engine's start and two steps on `device`, as `training` says."""
    for _ in itertools.islice(training(workload, objective, device, world, witness), STEPS):
        pass


def training(
    workload: Workload, objective: ObjectiveSpec, device: torch.device, world: World, witness: Witness
) -> Iterator[bool]:
    """The engine's start, and a step on `device` for each `next`, without end: whether it was taken.

    Where the engine needs a process group, it exists already, of torch's fake backend or a real one.
    """
    strategy, frozen = workload.strategy, workload.frozen
    with witness.phase("init"):
        witness.built(workload.model, frozen)
        if frozen is not None:  # before the engine takes the model, as in the trainer, which holds them against it
            frozen.to(device)
            witness.moved(frozen)
        engine = engines.create(strategy, workload.model, workload.family, device=device, world=world)
        ema = engines.ema_of(engine)
        witness.started(engine, ema)
        encoding = None
        if frozen is not None:
            encoding = witness.encoding(functools.partial(encode, frozen, strategy.encode_chunk))
        steps = feed(workload.make, strategy, pin=device.type != "cpu", seen=witness.held)
    while True:
        micro_batches = next(steps)
        taken = train_step(
            engine,
            workload.family,
            objective,
            witness.batches(micro_batches),
            lr=strategy.optimizer.lr,
            ema=ema,
            phase=witness.phase,
            encode=encoding,
        ).taken
        del micro_batches  # before the next ones are read, as the trainer does
        yield taken


def _frozen(encoders: OnlineEncoders) -> FrozenEncoders:
    from bigdit.encoders.frozen import FrozenEncoders  # transformers takes seconds to import

    return FrozenEncoders(encoders)
