"""The variational bound by which a variance is learned; the mean is learned by its squared error alone.

Source: Nichol & Dhariwal, arXiv:2102.09672: equations 4 to 7 (the bound), 10 and 11 (the posterior), 15 (the variance),
16 (the mean's gradient is stopped); Ho et al., arXiv:2006.11239, equation 13 (the last step, in bins of pixels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bigdit.objective_spec import DdpmSpec
from bigdit.objectives.noise import per_sample
from bigdit.objectives.schedule import alphas_cumprod

BIN = 1.0 / 255.0
"""Half of what lies between two values of a byte, in [-1, 1]; the code of both papers takes it for latents too."""
EDGE = 0.999
"""Beyond it a bin has no end, in the same code."""
LEAST = 1e-12
"""Of a probability whose logarithm is taken, in the same code."""


def variational_bound(
    objective: DdpmSpec, timesteps: Sequence[int], latents: torch.Tensor, error: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """Bits a latent, a scalar in fp32: the mean over samples of one term each.

    `error`: of what is predicted, its target subtracted; `share`: the output's second half, -1 and 1 standing for the
    least and the most that a variance can be; fp32 as `latents` [B, C, …].
    """
    steps = [_Step(objective, timestep) for timestep in timesteps]
    least, most = (per_sample(each, latents) for each in zip(*((s.least, s.most) for s in steps), strict=True))
    log_variance = least + (share + 1.0) / 2.0 * (most - least)
    # The means of the step and of its posterior are both of x_t, and differ by what x is missed by.
    missed = per_sample((step.missed for step in steps), latents) * error
    divergence = 0.5 * (log_variance - least - 1.0 + (least - log_variance).exp() + missed**2 * (-log_variance).exp())
    first = per_sample((timestep == 0 for timestep in timesteps), latents) > 0
    return torch.where(first, _surprise(latents, missed, log_variance), divergence).mean() / math.log(2.0)


class _Step:
    """One step back from a timestep: the logarithms of the `least` variance, the posterior's, and of the `most`, β; and
    the difference of means, x's posterior mean less the step's, for an error of 1 in what is predicted."""

    def __init__(self, objective: DdpmSpec, timestep: int) -> None:
        alphas = alphas_cumprod(objective)
        signal, before = alphas[timestep], alphas[timestep - 1] if timestep else 1.0
        beta = 1.0 - signal / before
        noise = math.sqrt(1.0 - signal)
        self.most = math.log(beta)
        self.least = math.log(_posterior(alphas, max(timestep, 1)))  # that of timestep 0 is 0
        of_x = {"epsilon": noise / math.sqrt(signal), "v": noise, "x0": -1.0} if signal else {"v": 1.0, "x0": -1.0}
        self.missed = math.sqrt(before) * beta / (1.0 - signal) * of_x[objective.prediction]


def _posterior(alphas: Sequence[float], timestep: int) -> float:
    signal, before = alphas[timestep], alphas[timestep - 1]
    return (1.0 - before) / (1.0 - signal) * (1.0 - signal / before)


def _surprise(latents: torch.Tensor, missed: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """-log of the probability of the bin of each latent, in a normal whose mean it exceeds by `missed`.

    Between a nearer and a farther end of the bin, both on the side where the tail is small: near 1 fp32 tells no
    probabilities apart that differ by less than 6e-8.
    """
    scale = (-0.5 * log_variance).exp() * math.sqrt(0.5)
    distance = torch.where(latents > EDGE, missed, torch.where(latents < -EDGE, -missed, missed.abs()))
    farther = torch.erfc((distance + BIN) * scale)
    farther = torch.where(latents.abs() > EDGE, torch.zeros_like(farther), farther)
    return -(0.5 * (torch.erfc((distance - BIN) * scale) - farther)).clamp(min=LEAST).log()
