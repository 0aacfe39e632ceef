"""Rectified flow: x_t = (1 - t) x + t ε, and the model learns the velocity ε - x.

t in (0, 1), 1 = noise, is drawn, then shifted by the sample's size: Esser et al., arXiv:2403.03206, section 3.1,
equation 19 (logit-normal), 20 (mode) and 23 (the shift).

Source: Lipman et al., arXiv:2210.02747; Liu et al., arXiv:2209.03003.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from bigdit.errors import UserError
from bigdit.objective_spec import ExponentialShift, FlowMatchingSpec, SqrtShift
from bigdit.objectives.prediction import Predict, draw_noise, of_latents, per_sample, weighted_mse

MOST_DRAWS = 100_000
"""The most draws of a t until it is in t_range: a tenth of a second."""


def loss(
    objective: FlowMatchingSpec,
    predict: Predict,
    latents: torch.Tensor,
    seeds: Sequence[int],
    compute_dtype: torch.dtype,
    tokens: int,
    at: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean squared error of the velocity, a scalar in fp32; see `objectives.loss`.

    A variance after the velocity is not trained.
    """
    noise = draw_noise(latents, seeds)
    times = draw_t(objective, seeds, tokens) if at is None else [at] * len(seeds)
    t = per_sample(times, latents)
    noisy = torch.lerp(latents, noise, t).to(compute_dtype)
    # One expression: a name would keep the velocity in the compute dtype alive.
    velocity = of_latents(predict(noisy, t.flatten()), latents.shape[1]).float()
    return weighted_mse(velocity, noise - latents, _weights(objective, times), mask)


def draw_t(objective: FlowMatchingSpec, seeds: Sequence[int], tokens: int) -> list[float]:
    """One t in (0, 1) per sample of `tokens`; it depends only on the seed."""
    alpha, (low, high) = shift_of(objective, tokens), objective.t_range
    times = []
    for source in map(random.Random, seeds):
        for _ in range(MOST_DRAWS):
            t = _draw(objective, source)
            t = alpha * t / (1.0 + (alpha - 1.0) * t)
            if low <= t <= high:
                break
        else:
            raise UserError(
                f"objective.t_range is [{low:g}, {high:g}], and none of {MOST_DRAWS:,} draws of t is in it; widen it, "
                "or change t_distribution or shift"
            )
        times.append(t)
    return times


def shift_of(objective: FlowMatchingSpec, tokens: int) -> float:
    """α of equation 23, for samples of `tokens`.

    Source of the exponential one: `calculate_shift` and `time_shift` of diffusers' FluxPipeline and its scheduler.
    """
    shift = objective.shift
    if isinstance(shift, SqrtShift):
        return math.sqrt(tokens / shift.base_tokens)
    if isinstance(shift, ExponentialShift):
        slope = (shift.max_mu - shift.base_mu) / (shift.max_tokens - shift.base_tokens)
        return math.exp(shift.base_mu + slope * (tokens - shift.base_tokens))
    return shift


def _draw(objective: FlowMatchingSpec, source: random.Random) -> float:
    if objective.t_distribution == "uniform":
        return source.random()
    if objective.t_distribution == "mode":
        u = source.random()
        return 1.0 - u - objective.mode_scale * (math.cos(math.pi / 2.0 * u) ** 2 - 1.0 + u)
    return 1.0 / (1.0 + math.exp(-source.gauss(objective.logit_mean, objective.logit_std)))


def _weights(objective: FlowMatchingSpec, times: Sequence[float]) -> list[float] | None:
    """One weight per sample, or None.

    Source: `compute_loss_weighting_for_sd3` of diffusers; cosmap after Esser et al., arXiv:2403.03206, section 3.1.
    """
    if objective.weighting == "sigma_sqrt":
        return [t**-2 for t in times]
    if objective.weighting == "cosmap":
        return [2.0 / (math.pi * (1.0 - 2.0 * t + 2.0 * t**2)) for t in times]
    return None
