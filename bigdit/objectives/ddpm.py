"""Denoising diffusion: x_t = √ᾱ x + √(1 - ᾱ) ε at a uniformly drawn timestep; the model learns ε, v or x.

Source: Ho et al., arXiv:2006.11239, algorithm 1; v = √ᾱ ε - √(1 - ᾱ) x: Salimans & Ho, arXiv:2202.00512; a learned
variance: Nichol & Dhariwal, arXiv:2102.09672, section 3.1. The noise schedule, from timestep 0 with the least noise, is
in Python floats, because losses read single numbers of it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from functools import cache

import torch

from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec
from bigdit.objectives.prediction import (
    Predict,
    draw_noise,
    masked,
    of_latents,
    per_sample,
    weighted_mse,
)


def loss(
    objective: DdpmSpec,
    predict: Predict,
    latents: torch.Tensor,
    seeds: Sequence[int],
    compute_dtype: torch.dtype,
    at: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean squared error of the prediction, and the bound that trains a learned variance; a scalar in fp32.

    See `objectives.loss`. Raises UserError if a variance is to be learned, and the model predicts none.
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
    squared = weighted_mse(prediction, target, _weights(objective, signals), mask)
    if not _learns_variance(objective, output, latents.shape[1]):
        return squared
    share = output[:, latents.shape[1] :].float()
    bound = variational_bound(objective, timesteps, latents, (prediction - target).detach(), share, mask)
    return squared + bound * (objective.timesteps / 1000)


def draw_timesteps(objective: DdpmSpec, seeds: Sequence[int]) -> list[int]:
    """One timestep per sample, from 0 on; it depends only on the seed."""
    return [random.Random(seed).randrange(objective.timesteps) for seed in seeds]


def _nearest(objective: DdpmSpec, at: float) -> int:
    """The timestep of a t in (0, 1)."""
    return min(round(at * objective.timesteps), objective.timesteps - 1)


def model_time(objective: DdpmSpec, timesteps: Sequence[int]) -> torch.Tensor:
    """Timesteps as t [B] in [0, 1), in fp64: with fp32, 1000 t is wrong in the last bit for ten timesteps."""
    return torch.tensor([timestep / objective.timesteps for timestep in timesteps], dtype=torch.float64)


def _learns_variance(objective: DdpmSpec, output: torch.Tensor, channels: int) -> bool:
    has = output.shape[1] == 2 * channels
    if objective.learned_variance and not has:
        raise UserError(
            f"objective.learned_variance is true, and the model predicts {output.shape[1]} channels of latents with "
            f"{channels}, no variance after them; set it to false, or model.kwargs.out_channels to {2 * channels}"
        )
    return has and objective.learned_variance is not False


BIN = 1.0 / 255.0
"""Half the distance between two byte values, in [-1, 1]. The code of both papers uses it for latents too."""
EDGE = 0.999
"""Values beyond it are in an open-ended bin, in the same code."""
LEAST = 1e-12
"""The least probability before the logarithm, in the same code."""


def variational_bound(
    objective: DdpmSpec,
    timesteps: Sequence[int],
    latents: torch.Tensor,
    error: torch.Tensor,
    share: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bits per latent, a scalar in fp32: the mean over samples of one term each.

    `error`: the prediction minus its target. `share`: the output's second half; -1 and 1 are the least and the most
    possible variance. Both are fp32, like `latents` [B, C, …]. `mask`: as in weighted_mse.
    """
    steps = [_Step(objective, timestep) for timestep in timesteps]
    least, most = (per_sample(each, latents) for each in zip(*((s.least, s.most) for s in steps), strict=True))
    log_variance = least + (share + 1.0) / 2.0 * (most - least)
    # The means of the step and of its posterior differ by the error in x.
    missed = per_sample((step.missed for step in steps), latents) * error
    divergence = 0.5 * (log_variance - least - 1.0 + (least - log_variance).exp() + missed**2 * (-log_variance).exp())
    first = per_sample((timestep == 0 for timestep in timesteps), latents) > 0
    each = torch.where(first, _surprise(latents, missed, log_variance), divergence)
    return masked(each, mask).mean() / math.log(2.0)


class _Step:
    """One step back from a timestep: logarithms of the `least` variance, the posterior's, and of the `most`, β.

    `missed`: the posterior's mean minus the step's, for an error of 1 in the prediction.
    """

    def __init__(self, objective: DdpmSpec, timestep: int) -> None:
        alphas = alphas_cumprod(objective)
        signal, before = alphas[timestep], alphas[timestep - 1] if timestep else 1.0
        beta = 1.0 - signal / before
        noise = math.sqrt(1.0 - signal)
        self.most = math.log(beta)
        self.least = math.log(_posterior(alphas, max(timestep, 1)))  # for timestep 0 it is 0
        of_x = {"epsilon": noise / math.sqrt(signal), "v": noise, "x0": -1.0} if signal else {"v": 1.0, "x0": -1.0}
        self.missed = math.sqrt(before) * beta / (1.0 - signal) * of_x[objective.prediction]


def _posterior(alphas: Sequence[float], timestep: int) -> float:
    signal, before = alphas[timestep], alphas[timestep - 1]
    return (1.0 - before) / (1.0 - signal) * (1.0 - signal / before)


def _surprise(latents: torch.Tensor, missed: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """-log of the probability of each latent's bin, under a normal distribution whose mean it exceeds by `missed`.

    It is the difference between the tails at the nearer and the farther end of the bin. Tails are small numbers; near
    1, fp32 cannot represent differences below 6e-8.
    """
    scale = (-0.5 * log_variance).exp() * math.sqrt(0.5)
    distance = torch.where(latents > EDGE, missed, torch.where(latents < -EDGE, -missed, missed.abs()))
    farther = torch.erfc((distance + BIN) * scale)
    farther = torch.where(latents.abs() > EDGE, torch.zeros_like(farther), farther)
    return -(0.5 * (torch.erfc((distance - BIN) * scale) - farther)).clamp(min=LEAST).log()


def _weights(objective: DdpmSpec, signals: Sequence[float]) -> list[float] | None:
    """One weight per sample, or None; `signals`: ᾱ of its timestep.

    Both kinds weight the error of x: by min(SNR, γ) (Hang et al., arXiv:2303.09556), or by SNR / (k + SNR)^γ (Choi et
    al., arXiv:2204.00227, who write it for ε). The error of ε is that of x times SNR, and the error of v that of x
    times SNR + 1 (Salimans & Ho, arXiv:2202.00512, section 4).
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


@cache
def alphas_cumprod(objective: DdpmSpec) -> tuple[float, ...]:
    """ᾱ of each timestep: x_t = √ᾱ x + √(1 - ᾱ) ε (Ho et al., arXiv:2006.11239, equation 4)."""
    alphas = _cumprod(objective)
    return _zero_terminal(alphas) if objective.zero_terminal_snr else alphas


def shifted_betas(objective: DdpmSpec) -> list[float]:
    """The betas whose signal-to-noise ratios are divided by `snr_shift`, before a zero terminal SNR."""
    alphas = _cumprod(objective)
    return [1.0 - after / before for before, after in itertools.pairwise((1.0, *alphas))]


def _cumprod(objective: DdpmSpec) -> tuple[float, ...]:
    alphas = itertools.accumulate((1.0 - beta for beta in _betas(objective)), lambda a, b: a * b)
    shift = objective.snr_shift
    return tuple(alpha / (shift + (1.0 - shift) * alpha) for alpha in alphas)


def _betas(objective: DdpmSpec) -> list[float]:
    count, start, end = objective.timesteps, objective.beta_start, objective.beta_end
    shares = [i / (count - 1) for i in range(count)]
    if objective.betas == "linear":  # Ho et al., section 4
        return [start + (end - start) * share for share in shares]
    if objective.betas == "scaled_linear":  # linear in its root: Rombach et al., arXiv:2112.10752, as in their code
        return [(math.sqrt(start) + (math.sqrt(end) - math.sqrt(start)) * share) ** 2 for share in shares]
    return [min(1.0 - _cosine((i + 1) / count) / _cosine(i / count), 0.999) for i in range(count)]


def _cosine(share: float) -> float:
    """Nichol & Dhariwal, arXiv:2102.09672, equation 17, whose betas end at 0.999."""
    return math.cos((share + 0.008) / 1.008 * math.pi / 2.0) ** 2


def _zero_terminal(alphas: tuple[float, ...]) -> tuple[float, ...]:
    """√ᾱ shifted to end at 0 and scaled to begin as before (Lin et al., arXiv:2305.08891, algorithm 1)."""
    roots = [math.sqrt(alpha) for alpha in alphas]
    first, last = roots[0], roots[-1]
    return tuple(((root - last) * first / (first - last)) ** 2 for root in roots)
