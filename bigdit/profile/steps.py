"""The one description of what runs on a GPU, emulated or real: a model, its engine, and training steps."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from bigdit import engines, models
from bigdit.catalog.encoders import OnlineEncoders
from bigdit.catalog.families import LOSS_MASK
from bigdit.engines import Ema, Engine
from bigdit.loader.batch import Batch, RawBatch, read_ahead
from bigdit.models import Family
from bigdit.profile.attempt import StepRequest
from bigdit.profile.watch import Watch
from bigdit.strategy import BatchShape, Strategy
from bigdit.train.step import Encode, encode, train_step

if TYPE_CHECKING:
    from bigdit.encoders.frozen import FrozenEncoders


STEPS = 2  # optimizer state appears in the first one


@dataclass(frozen=True)
class Workload:
    """What a request runs: a model in CPU memory, arranged for its strategy, encoders, and batches."""

    request: StepRequest
    model: nn.Module
    family: Family
    frozen: FrozenEncoders | None
    make: Callable[[], Batch | RawBatch]
    params: int


@dataclass(frozen=True)
class Built:
    """The model with its adapters, and the encoders, in CPU memory, before `models.arrange`."""

    model: nn.Module
    frozen: FrozenEncoders | None


def build(request: StepRequest, seed: int | None = None) -> Built:
    """Build model and encoders as the trainer does. Many attempts may start from one, each in its own process."""
    strategy = request.strategy
    model = models.build(request.model, device="cpu", dtype=engines.compute_dtype(strategy), seed=seed)
    if strategy.lora is not None:  # PiSSA's singular vectors take minutes, and need no other memory
        strategy = strategy.model_copy(update={"lora": strategy.lora.model_copy(update={"pissa": False})})
    models.adapt(model, models.family(request.model.class_name), strategy)
    if request.encoders is None:
        return Built(model, None)
    from bigdit.encoders.frozen import FrozenEncoders  # transformers takes seconds to import

    frozen = FrozenEncoders(request.encoders)
    if strategy.trains_text:
        frozen.trained = True
        models.adapt_text(model, frozen.clips(), strategy)
    return Built(model, frozen)


def prepare(request: StepRequest, built: Built) -> Workload:
    """Arrange the model for the strategy, and choose how batches are made."""
    strategy, encoders, model = request.strategy, request.encoders, built.model
    family = models.family(request.model.class_name)
    models.arrange(model, family, strategy)
    extras = family.extras(model) | models.images(family, model, request.batch)
    if strategy.repeated_samples:  # the batch's mask has their weights
        extras |= {LOSS_MASK: models.Extra(request.batch.latents[-2:], fill=1)}
    own = (param for name, param in model.named_parameters() if not name.startswith(models.TEXT_ENCODERS))
    params = sum(param.numel() for param in own)
    if encoders is None:
        make = functools.partial(batch, request.batch, strategy, extras)
        return Workload(request, model, family, None, make, params)
    raw = functools.partial(raw_batch, encoders, request.batch, strategy, extras)
    return Workload(request, model, family, built.frozen, raw, params)


class Witness:
    """Watches steps as they run. This one does nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context around init, and around each phase of `train_step`."""
        return nullcontext()

    def built(self, model: nn.Module, frozen: FrozenEncoders | None) -> None:
        """In init, before the engine takes the model."""

    def started(self, engine: Engine, ema: Ema | None) -> Witness | Watch:
        """In init, when the engine has the model, and the encoders are on the device. Returns the next witness."""
        return self

    def held(self, batch: Any) -> None:
        """The loader has made a micro-batch, for this step or a later one."""

    def batches(self, micro_batches: Sequence[Any]) -> Sequence[Any]:
        """The micro-batches that the step gets."""
        return micro_batches

    def encoding(self, encode: Encode) -> Encode:
        """The function that encodes in place of `encode`."""
        return encode


def training(workload: Workload, device: torch.device, witness: Witness) -> Iterator[bool]:
    """Start the engine, then take a step on `device` for each `next`, without end; yields whether it was taken.

    If the engine needs a process group, it must exist, of torch's fake backend or a real one.
    """
    strategy, frozen = workload.request.strategy, workload.frozen
    with witness.phase("init"):
        witness.built(workload.model, frozen)
        if frozen is not None:  # before the engine takes the model, as in the trainer, which compares them
            frozen.to(device)
        engine = engines.create(strategy, workload.model, workload.family, device=device)
        ema = engines.ema_of(engine)
        watch = witness.started(engine, ema)
        encoding = None
        if frozen is not None:
            encoding = watch.encoding(functools.partial(encode, frozen, strategy.encode_chunk))
        steps = step_batches(workload.make, strategy, pin=device.type != "cpu", on_batch=watch.held)
    while True:
        micro_batches = next(steps)
        taken = train_step(
            engine,
            workload.family,
            workload.request.objective,
            watch.batches(micro_batches),
            lr=strategy.optimizer.lr,
            ema=ema,
            phase=watch.phase,
            encode=encoding,
        ).taken
        del micro_batches  # before the next ones are read, as the trainer does
        yield taken


def take(steps: Iterator[bool]) -> None:
    """Take one of the first steps. Raises RuntimeError if it was skipped."""
    if not next(steps):
        raise RuntimeError("a step was not taken, since its gradients are not finite: no optimizer state was made")


@contextmanager
def group(strategy: Strategy) -> Iterator[None]:
    """The process group of the strategy: all ranks that torchrun started, or the first rank alone."""
    if strategy.engine == "single":
        yield
    elif dist.is_torchelastic_launched():
        dist.init_process_group("cpu:gloo,cuda:nccl")
        yield
        dist.barrier()  # the store ends with rank 0, and others may still read it
    else:
        _start_first_of(strategy.world_size)
        yield


def _start_first_of(size: int) -> None:
    """NCCL over a store without peers; collectives of CPU tensors use torch's fake backend."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the backend

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=size)
    # Since torch 2.15 the group has its device from the start, and subgroups are split from it, which asks the peers.
    # Without a device, each subgroup is a new group with a known size.
    dist.distributed_c10d._get_default_group().bound_device_id = None


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NO_EXTRAS: Mapping[str, models.Extra] = MappingProxyType({})


def batch(shape: BatchShape, strategy: Strategy, extras: Mapping[str, models.Extra] = NO_EXTRAS) -> Batch:
    """A micro-batch in CPU memory, as the loader makes it: latents in the stored dtype, text in bf16."""
    count = strategy.micro_batch_size
    text = shape.text
    return Batch(
        latents=torch.zeros(count, *shape.latents, dtype=_DTYPES[shape.latents_dtype]),
        text_embeds=None if text is None else torch.zeros(count, *text, dtype=torch.bfloat16),
        text_mask=None if text is None else torch.ones(count, text[0], dtype=torch.bfloat16),
        seeds=tuple(range(count)),
        extras=_extras(count, shape, extras),
    )


def raw_batch(
    encoders: OnlineEncoders, shape: BatchShape, strategy: Strategy, extras: Mapping[str, models.Extra] = NO_EXTRAS
) -> RawBatch:
    """A micro-batch in CPU memory for the encoders: images in uint8, and captions that fill each encoder's tokens.

    Some encoders make masks of [B, 1, T, T] for padded captions. These captions have no padding.
    """
    count = strategy.micro_batch_size
    captions = [(count, encoder.tokens) for encoder in encoders.text]
    return RawBatch(
        pixels=torch.zeros(count, *encoders.pixels, dtype=torch.uint8),
        tokens=tuple((torch.zeros(*each, dtype=torch.int64), torch.ones(each, dtype=torch.int64)) for each in captions),
        seeds=tuple(range(count)),
        extras=_extras(count, shape, {name: each for name, each in extras.items() if name not in encoders.extras}),
    )


def step_batches(
    make: Callable[[], Any], strategy: Strategy, *, pin: bool, on_batch: Callable[[Any], None] = lambda batch: None
) -> Iterator[list[Any]]:
    """The micro-batches of one step after another, without end; `on_batch` is called with each.

    The trainer reads in a thread, whose allocations the recorder does not see. Here the main thread reads. This leaves
    out what the thread holds while it reads, and the page cache of the store's files, which the system can drop.
    """

    def read(step: int) -> list[Any]:
        made = [make().pin_memory() if pin else make() for _ in range(strategy.grad_accum_steps)]
        for each in made:
            on_batch(each)
        return made

    return read_ahead(read, itertools.count(), strategy.read_ahead_steps, _ThisThread())


def _extras(count: int, shape: BatchShape, extras: Mapping[str, models.Extra]) -> dict[str, torch.Tensor]:
    return {
        name: torch.full((count, *extra.sample_shape(shape.latents)), extra.fill, dtype=extra.dtype)
        for name, extra in extras.items()
    }


class _ThisThread(Executor):
    """An executor without threads: a submitted function runs at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
