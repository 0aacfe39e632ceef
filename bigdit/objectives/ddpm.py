"""Denoising diffusion: x_t = √ᾱ x + √(1 - ᾱ) ε at a timestep drawn evenly, and the model learns ε, v or x.

Source: Ho et al., arXiv:2006.11239, algorithm 1; v = √ᾱ ε - √(1 - ᾱ) x: Salimans & Ho, arXiv:2202.00512; a learned
variance beside it: Nichol & Dhariwal, arXiv:2102.09672, section 3.1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec
from bigdit.objectives.noise import draw_noise, per_sample
from bigdit.objectives.output import Predict, has_variance, of_latents
from bigdit.objectives.schedule import alphas_cumprod
from bigdit.objectives.variance import variational_bound
from bigdit.objectives.weights import ddpm_weights, weighted_mse


def loss(
    objective: DdpmSpec,
    predict: Predict,
    latents: torch.Tensor,
    seeds: Sequence[int],
    compute_dtype: torch.dtype,
    at: float | None = None,
) -> torch.Tensor:
    """Mean squared error of what is predicted, and the bound that a learned variance is trained by; a scalar in fp32.

    See `objectives.loss`. Raises UserError where a variance is to be learned that the model does not predict.
    """
    noise = draw_noise(latents, seeds)
    timesteps = draw_timesteps(objective, seeds) if at is None else [_nearest(objective, at)] * len(seeds)
    signals = [alphas_cumprod(objective)[timestep] for timestep in timesteps]
    alpha = per_sample((math.sqrt(signal) for signal in signals), latents)
    sigma = per_sample((math.sqrt(1.0 - signal) for signal in signals), latents)
    noisy = (alpha * latents).addcmul_(sigma, noise).to(compute_dtype)
    output = predict(noisy, model_time(objective, timesteps).to(latents.device, non_blocking=True))

    prediction = of_latents(output, latents.shape[1]).float()
    if objective.prediction == "epsilon":
        target = noise
    elif objective.prediction == "v":
        target = alpha * noise - sigma * latents
    else:
        target = latents
    squared = weighted_mse(prediction, target, ddpm_weights(objective, signals))
    if not _learns_variance(objective, output, latents.shape[1]):
        return squared
    share = output[:, latents.shape[1] :].float()
    bound = variational_bound(objective, timesteps, latents, (prediction - target).detach(), share)
    return squared + bound * (objective.timesteps / 1000)


def draw_timesteps(objective: DdpmSpec, seeds: Sequence[int]) -> list[int]:
    """A timestep a sample, from 0, from its seed alone."""
    return [random.Random(seed).randrange(objective.timesteps) for seed in seeds]


def _nearest(objective: DdpmSpec, at: float) -> int:
    """The timestep of a t in (0, 1)."""
    return min(round(at * objective.timesteps), objective.timesteps - 1)


def model_time(objective: DdpmSpec, timesteps: Sequence[int]) -> torch.Tensor:
    """Timesteps as t [B] in [0, 1). In fp64: of fp32, 1000 t would miss ten of the thousand timesteps by a last bit."""
    return torch.tensor([timestep / objective.timesteps for timestep in timesteps], dtype=torch.float64)


def _learns_variance(objective: DdpmSpec, output: torch.Tensor, channels: int) -> bool:
    has = has_variance(output, channels)
    if objective.learned_variance and not has:
        raise UserError(
            f"objective.learned_variance is true, and the model predicts {output.shape[1]} channels of latents with "
            f"{channels}, no variance beside them; set it to false, or model.kwargs.out_channels to {2 * channels}"
        )
    return has and objective.learned_variance is not False
