"""What objectives share: a sample's noise, what a model predicts from it, and squared errors with weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F


def draw_noise(like: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """Gaussian noise of the shape, dtype and device of `like` [B, …]; row i depends only on seeds[i]."""
    noise = torch.empty_like(like)
    generator = torch.Generator(like.device)
    for row, seed in zip(noise, seeds, strict=True):
        row.normal_(generator=generator.manual_seed(seed))
    return noise


def per_sample(numbers: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """One number per sample, fp32 [B, 1, …], on the device of `like` [B, …].

    The copy does not block: otherwise the CPU would wait for the previous micro-batch.
    """
    made = torch.tensor([*numbers], dtype=torch.float32).to(like.device, non_blocking=True)
    return made.view(-1, *(1,) * (like.dim() - 1))


Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(latents [B, C, (F,) H, W] in the compute dtype, t [B] in [0, 1], 1 = noise) -> the output [B, C or 2 C, …]."""


def of_latents(output: torch.Tensor, channels: int) -> torch.Tensor:
    """The prediction [B, channels, …]: the first half of an output with a variance."""
    return output if output.shape[1] == channels else output[:, :channels]


def weighted_mse(
    prediction: torch.Tensor, target: torch.Tensor, weights: Sequence[float] | None, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean over samples [B, …] of their mean squared errors times their weights; None: all are equal.

    `mask` [B, H, W]: the weight of each place.
    """
    if weights is None and mask is None:
        return F.mse_loss(prediction, target)
    error = F.mse_loss(prediction, target, reduction="none")
    error = error if weights is None else error * per_sample(weights, target)
    return masked(error, mask).mean()


def masked(error: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """An error [B, C, (F,) H, W] times the weights [B, H, W] of places, if there is a mask."""
    if mask is None:
        return error
    return error * mask.float().view(len(mask), *(1,) * (error.dim() - mask.dim()), *mask.shape[1:])
