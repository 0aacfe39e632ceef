"""A sample's noise, what a model predicts from it, and the weight of each sample's squared error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F

from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec


def draw_noise(like: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """Gaussian noise of the shape, dtype and device of `like` [B, …]; row i depends on seeds[i] alone."""
    noise = torch.empty_like(like)
    generator = torch.Generator(like.device)
    for row, seed in zip(noise, seeds, strict=True):
        row.normal_(generator=generator.manual_seed(seed))
    return noise


def per_sample(numbers: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """A number a sample, fp32 [B, 1, …] on the device of `like` [B, …].

    The copy does not block: else the CPU would wait until the micro-batch before is done.
    """
    made = torch.tensor([*numbers], dtype=torch.float32).to(like.device, non_blocking=True)
    return made.view(-1, *(1,) * (like.dim() - 1))


Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(latents [B, C, (F,) H, W] in the compute dtype, t [B] in [0, 1], 1 = noise) -> the output [B, C or 2 C, …]."""


def of_latents(output: torch.Tensor, channels: int) -> torch.Tensor:
    """The prediction [B, channels, …]: the first half of an output that has a variance too."""
    return output if output.shape[1] == channels else output[:, :channels]


def has_variance(output: torch.Tensor, channels: int) -> bool:
    """Whether the output has a second half."""
    return output.shape[1] == 2 * channels


def weighted_mse(
    prediction: torch.Tensor, target: torch.Tensor, weights: Sequence[float] | None, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean over samples [B, …] of each one's mean squared error times its weight; None: all count the same.

    `mask` [B, H, W]: the weight of each place.
    """
    if weights is None and mask is None:
        return F.mse_loss(prediction, target)
    error = F.mse_loss(prediction, target, reduction="none")
    error = error if weights is None else error * per_sample(weights, target)
    return masked(error, mask).mean()


def masked(error: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """An error [B, C, (F,) H, W] times the weights [B, H, W] of places, if there are any."""
    if mask is None:
        return error
    return error * mask.float().view(len(mask), *(1,) * (error.dim() - mask.dim()), *mask.shape[1:])


def flow_weights(objective: FlowMatchingSpec, times: Sequence[float]) -> list[float] | None:
    """A weight a sample, or None.

    Source: `compute_loss_weighting_for_sd3` of diffusers; cosmap after Esser et al., arXiv:2403.03206, section 3.1.
    """
    if objective.weighting == "sigma_sqrt":
        return [t**-2 for t in times]
    if objective.weighting == "cosmap":
        return [2.0 / (math.pi * (1.0 - 2.0 * t + 2.0 * t**2)) for t in times]
    return None


def ddpm_weights(objective: DdpmSpec, signals: Sequence[float]) -> list[float] | None:
    """A weight a sample, or None; `signals`: ᾱ of its timestep.

    Both weigh the error of x: by min(SNR, γ) (Hang et al., arXiv:2303.09556), or by SNR / (k + SNR)^γ (Choi et al.,
    arXiv:2204.00227, who write it for ε). ε's error is x's times SNR, and v's is x's times SNR + 1 (Salimans & Ho,
    arXiv:2202.00512, section 4).
    """
    if objective.min_snr_gamma is None and objective.p2_gamma is None:
        return None
    return [_weight_of_x(objective, signal) / _error_in_x(objective, signal) for signal in signals]


def _weight_of_x(objective: DdpmSpec, signal: float) -> float:
    snr = signal / (1.0 - signal)
    if objective.min_snr_gamma is not None:
        return min(snr, objective.min_snr_gamma)
    assert objective.p2_gamma is not None  # one of the two
    return snr / (objective.p2_k + snr) ** objective.p2_gamma


def _error_in_x(objective: DdpmSpec, signal: float) -> float:
    """The squared error of the prediction, for a squared error of 1 in x."""
    snr = signal / (1.0 - signal)
    return {"x0": 1.0, "epsilon": snr, "v": snr + 1.0}[objective.prediction]
