"""Rectified flow: x_t = (1 - t) x + t ε, and the model learns the velocity ε - x.

Source: Lipman et al., arXiv:2210.02747; Liu et al., arXiv:2209.03003; t from a logit-normal and its shift
with resolution: Esser et al., arXiv:2403.03206, section 3.1 and equation 23.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from bigdit.spec import ObjectiveSpec

Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(latents [B, C, H, W] in the compute dtype, t [B] fp32) -> velocity of the latents' shape."""


def loss(
    objective: ObjectiveSpec,
    predict: Predict,
    latents: torch.Tensor,
    seeds: Sequence[int],
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """Mean squared error of the velocity, a scalar in fp32, for fp32 latents [B, C, (F,) H, W] and a seed a sample."""
    noise = draw_noise(latents, seeds)
    t = torch.tensor(draw_t(objective, seeds), dtype=torch.float32).to(latents.device)
    noisy = torch.lerp(latents, noise, t.view(-1, *(1,) * (latents.dim() - 1))).to(compute_dtype)
    return F.mse_loss(predict(noisy, t).float(), noise - latents)


def draw_t(objective: ObjectiveSpec, seeds: Sequence[int]) -> list[float]:
    """One t in (0, 1) a sample, from its seed alone."""
    return [_shifted(objective, random.Random(seed)) for seed in seeds]


def _shifted(objective: ObjectiveSpec, source: random.Random) -> float:
    uniform = objective.t_distribution == "uniform"
    t = source.random() if uniform else 1.0 / (1.0 + math.exp(-source.gauss(0.0, 1.0)))
    return objective.shift * t / (1.0 + (objective.shift - 1.0) * t)


def draw_noise(like: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """Gaussian noise of the shape, dtype and device of `like` [B, …]; row i depends on seeds[i] alone."""
    noise = torch.empty_like(like)
    generator = torch.Generator(like.device)
    for row, seed in zip(noise, seeds, strict=True):
        row.normal_(generator=generator.manual_seed(seed))
    return noise


def euler(predict: Predict, noise: torch.Tensor, steps: int, shift: float) -> torch.Tensor:
    """Samples [B, C, H, W] from noise, by `steps` Euler steps from t = 1 to t = 0 on diffusers' schedule."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps, device=noise.device)
    latents = noise
    for timestep in scheduler.timesteps:
        t = (timestep / scheduler.config.num_train_timesteps).expand(latents.shape[0])
        latents = scheduler.step(predict(latents, t), timestep, latents, return_dict=False)[0]
    return latents
