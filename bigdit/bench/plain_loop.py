"""The training loop that one would write by hand: the same model, precision, loss and optimizer, and no engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bigdit import engines, objectives, optim
from bigdit.engines.ema import shares_of_new
from bigdit.loader.batch import Batch
from bigdit.models import Family
from bigdit.objective_spec import ObjectiveSpec
from bigdit.spec import Strategy


@dataclass(frozen=True)
class Step:
    """A step that was taken: its seconds, until the device had its loss, and the loss."""

    seconds: float
    loss: float


def plain_steps(
    model: nn.Module,
    family: Family,
    strategy: Strategy,
    objective: ObjectiveSpec,
    read: Callable[[], Sequence[Batch]],
    device: torch.device,
) -> Iterator[Step]:
    """One step after another of a model in the compute dtype, without end, on the micro-batches that `read` gives.

    bf16 and fp16 have fp32 masters, whose gradients all exist at once; fp16 is scaled by torch's GradScaler. The
    optimizer steps after the backward pass, whatever the strategy says of it.
    """
    dtype, mixed = engines.compute_dtype(strategy), strategy.precision in ("bf16", "fp16")
    model = model.to(device)
    params = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().float() for param in params] if mixed else params
    grouped = optim.groups(strategy.optimizer, model, masters)
    optimizer = optim.build(strategy.optimizer, grouped, stochastic_rounding=strategy.precision == "bf16_sr")
    scaler = torch.amp.GradScaler(device.type, enabled=strategy.precision == "fp16")
    ema = strategy.ema
    place = torch.device("cpu") if ema is not None and ema.device == "cpu" else device
    averages = [
        [master.detach().to(place, torch.float32, copy=True) for master in masters]
        for _ in range(0 if ema is None else ema.count)
    ]
    for update in itertools.count(1):
        micro_batches = read()
        began, total = time.perf_counter(), torch.zeros((), device=device)
        for host_batch in micro_batches:
            batch = host_batch.to(device, dtype)

            def predict(latents: torch.Tensor, t: torch.Tensor, batch: Batch = batch) -> torch.Tensor:
                return family.predict(model, latents, t, batch)

            tokens = family.tokens(model, batch.latents.shape)
            loss = objectives.loss(objective, predict, batch.latents, batch.seeds, dtype, tokens) / len(micro_batches)
            scaler.scale(loss).backward()
            total += loss.detach()
        if mixed:
            for param, master in zip(params, masters, strict=True):
                master.grad, param.grad = None if param.grad is None else param.grad.float(), None
        scaler.unscale_(optimizer)
        if strategy.gradient_clipping is not None:
            nn.utils.clip_grad_norm_(masters, strategy.gradient_clipping)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            if mixed:
                torch._foreach_copy_(params, masters)
            if ema is not None:
                for each, share in zip(averages, shares_of_new(ema, update), strict=True):
                    for average, master in zip(each, masters, strict=True):
                        average.lerp_(master.to(place, torch.float32), share)
        seen = float(total)  # waits for the device
        yield Step(time.perf_counter() - began, seen)
