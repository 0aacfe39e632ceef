"""What a model answers: a prediction, and with a learned variance as many channels more."""

from __future__ import annotations

from collections.abc import Callable

import torch

Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(latents [B, C, (F,) H, W] in the compute dtype, t [B] in [0, 1], 1 = noise) -> the output [B, C or 2 C, …]."""


def of_latents(output: torch.Tensor, channels: int) -> torch.Tensor:
    """The prediction [B, channels, …]: the first half of an output that has a variance beside it."""
    return output if output.shape[1] == channels else output[:, :channels]


def has_variance(output: torch.Tensor, channels: int) -> bool:
    """Whether there is a second half."""
    return output.shape[1] == 2 * channels
