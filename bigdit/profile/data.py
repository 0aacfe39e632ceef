"""The loader of emulated steps: batches of zeros, held, pinned and handed out as the trainer's stream does it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from types import MappingProxyType
from typing import Any

import torch

from bigdit import models
from bigdit.catalog.encoders import OnlineEncoders
from bigdit.loader.ahead import read_ahead
from bigdit.loader.batch import Batch
from bigdit.loader.raw import RawBatch
from bigdit.spec import BatchShape, Strategy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NO_EXTRAS: Mapping[str, models.Extra] = MappingProxyType({})


def batch(shape: BatchShape, strategy: Strategy, extras: Mapping[str, models.Extra] = NO_EXTRAS) -> Batch:
    """A micro-batch on the host as the store gives it: latents as they are stored, text in bf16."""
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
    """A micro-batch on the host to be encoded: pictures in uint8, and captions that fill each encoder's tokens.

    Padded captions have masks of [B, 1, T, T] beside them in some encoders, which these do not have.
    """
    count = strategy.micro_batch_size
    return RawBatch(
        pixels=torch.zeros(count, *encoders.pixels, dtype=torch.uint8),
        tokens=tuple(_tokens(count, encoder.tokens) for encoder in encoders.text),
        seeds=tuple(range(count)),
        extras=_extras(count, shape, {name: each for name, each in extras.items() if name not in encoders.extras}),
    )


def feed(
    make: Callable[[], Any], strategy: Strategy, *, pin: bool, seen: Callable[[Any], None] = lambda batch: None
) -> Iterator[list[Any]]:
    """The micro-batches of one step after another, without end; `seen` hears of each when it is held.

    The trainer's stream reads in a thread, whose allocations no recorder sees; here this one reads. What a thread
    holds for a moment while it reads, the stored latents and texts of one micro-batch, is left out, and so is
    the system's page cache of the store's files, which is free to go.
    """

    def read(step: int) -> list[Any]:
        return [held() for _ in range(strategy.grad_accum_steps)]

    def held() -> Any:
        made = make().pin_memory() if pin else make()
        seen(made)
        return made

    return read_ahead(read, itertools.count(), strategy.read_ahead_steps, _ThisThread())


def _extras(count: int, shape: BatchShape, extras: Mapping[str, models.Extra]) -> dict[str, torch.Tensor]:
    return {
        name: torch.full((count, *extra.sample_shape(shape.latents)), extra.fill, dtype=extra.dtype)
        for name, extra in extras.items()
    }


def _tokens(count: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, tokens, dtype=torch.int64), torch.ones(count, tokens, dtype=torch.int64)


class _ThisThread(Executor):
    """An executor without threads: what is submitted is done."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
