"""The training step: the only description of it, for the trainer, the benchmarks and the emulated GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.profiler import record_function

from bigdit import objectives, optim
from bigdit.catalog.families import FAMILIES, LOSS_MASK
from bigdit.engines import Ema, Engine, compute_dtype
from bigdit.loader.batch import Batch, CaptionedBatch, RawBatch
from bigdit.models import Family
from bigdit.models.family import given_first_frame, has_first_frame
from bigdit.objective_spec import ObjectiveSpec

if TYPE_CHECKING:  # it imports what reads images
    from bigdit.encoders.protocol import EncodedBatch

Encode = Callable[[Any, torch.dtype], Batch]
"""Encodes a micro-batch without features; conditions get the dtype."""


class Encodes(Protocol):
    """Encodes a chunk of a micro-batch: the encoders of a run or of an attempt."""

    @property
    def encode(self) -> Callable[..., EncodedBatch]: ...


def encode(encoders: Encodes, chunk: int | None, batch: RawBatch | CaptionedBatch, compute_dtype: torch.dtype) -> Batch:
    """The features of a batch on the encoders' device, conditions in `compute_dtype`.

    Encodes `chunk` samples at a time; None: all.
    """
    parts = [encoders.encode(*chunked) for chunked in batch.chunks(chunk)]
    texts = [part.text_embeds for part in parts if part.text_embeds is not None]
    masks = [part.text_mask for part in parts if part.text_mask is not None]
    given = {name: _whole([part.extras[name] for part in parts]) for name in parts[0].extras}
    encoded = Batch(
        latents=_whole([part.latents for part in parts]),
        text_embeds=_whole(texts) if texts else None,
        text_mask=_whole(masks) if masks else None,
        seeds=batch.seeds,
        extras={**batch.extras, **given},
    )
    return encoded.to(encoded.latents.device, compute_dtype)


def _whole(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


Phase = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepResult:
    """`loss`: this process's mean over its micro-batches, a scalar on the device; `grad_norm`: None without clipping.

    `taken`: False if gradients were not finite; then weights, optimizer state and EMA did not change.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    taken: bool


def train_step(
    engine: Engine,
    family: Family,
    objective: ObjectiveSpec,
    micro_batches: Sequence[Batch | RawBatch | CaptionedBatch],
    *,
    lr: float,
    ema: Ema | None = None,
    phase: Phase = record_function,
    encode: Encode | None = None,
) -> StepResult:
    """One optimizer step over `micro_batches`: grad_accum_steps of them, in CPU memory.

    `encode`: for micro-batches without features. `ema` is updated with the new weights. `phase(name)` surrounds encode,
    forward, backward, step and ema: profiler ranges, or the recorder's phases.
    """
    dtype = compute_dtype(engine.strategy)
    losses = []
    optim.set_lr(engine.optimizer, lr)  # now, because the backward pass may step
    for i, host_batch in enumerate(micro_batches):
        batch: Any = host_batch
        if encode is not None:
            with phase("encode"):
                batch = encode(batch.to(engine.device, dtype), dtype)
        with phase("forward"):
            batch = batch.to(engine.device, dtype)
            predict = functools.partial(predict_by, engine, family, batch)
            tokens = family.tokens(engine.model, batch.latents.shape)
            mask = loss_mask(family, batch)
            loss = objectives.loss(objective, predict, batch.latents, batch.seeds, dtype, tokens, mask=mask)
            if engine.strategy.repeated_samples:  # the mask gives them weight 0: take the mean over the others
                loss = loss * (engine.strategy.places / engine.strategy.global_batch_size)
        with phase("backward"):
            engine.backward(loss, last=i == len(micro_batches) - 1)
        losses.append(loss.detach().clone())  # mse_loss's scalar keeps a storage of the latents' size
        del batch, predict, loss, mask
    with phase("step"):
        stepped = engine.step(lr, losses)
    if ema is not None and stepped.taken:
        with phase("ema"):
            ema.update()
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
    return StepResult(loss, stepped.grad_norm, stepped.taken)


def loss_mask(family: Family, batch: Batch) -> torch.Tensor | None:
    """The weight of the loss at each place [B, H, W] or [B, F, H, W]; None: all weigh 1.

    A given first frame, from which nothing is learned, has weight 0. Other frames weigh more, so that the mean is over
    them. Samples without such a frame have weight 1.
    """
    mask, frames = batch.extras.get(LOSS_MASK), batch.latents.shape[2]
    given = given_first_frame(batch.latents, batch) if FAMILIES[family.CLASS_NAME].keeps_first else None
    if given is None:
        return mask
    weights = given.new_full((len(given), frames, 1, 1), frames / (frames - 1), dtype=torch.float32)
    weights[:, 0] = 0
    weights = torch.where(has_first_frame(given)[:, 0], weights, 1.0)
    return weights if mask is None else weights * mask[:, None]


def predict_by(engine: Engine, family: Family, batch: Batch, latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The prediction of the engine's model for latents at t, under the batch's conditions."""
    return family.predict(engine.model, latents, t, batch)
