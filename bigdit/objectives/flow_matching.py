"""Rectified flow: x_t = (1 - t) x + t ε, and the model learns the velocity ε - x.

Source: Lipman et al., arXiv:2210.02747; Liu et al., arXiv:2209.03003.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigdit.objective_spec import FlowMatchingSpec
from bigdit.objectives.prediction import Predict, draw_noise, flow_weights, of_latents, per_sample, weighted_mse
from bigdit.objectives.schedule import draw_t


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
    velocity = of_latents(
        predict(noisy, t.flatten()), latents.shape[1]
    ).float()  # no name holds it in the compute dtype
    return weighted_mse(velocity, noise - latents, flow_weights(objective, times), mask)
