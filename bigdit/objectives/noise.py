"""Noise that depends on a sample's seed alone, and numbers of samples as tensors that go with latents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def draw_noise(like: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """Gaussian noise of the shape, dtype and device of `like` [B, …]; row i depends on seeds[i] alone."""
    noise = torch.empty_like(like)
    generator = torch.Generator(like.device)
    for row, seed in zip(noise, seeds, strict=True):
        row.normal_(generator=generator.manual_seed(seed))
    return noise


def per_sample(numbers: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """A number a sample, fp32 [B, 1, …] on the device of `like` [B, …].

    The host does not wait for the copy, or it would stand until the micro-batch before is done.
    """
    made = torch.tensor([*numbers], dtype=torch.float32).to(like.device, non_blocking=True)
    return made.view(-1, *(1,) * (like.dim() - 1))
