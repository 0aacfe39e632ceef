"""Noise schedules: what is left of the picture at each timestep, from 0 = almost all of it.

In python's floats: losses take single numbers of them, which an emulated GPU computes.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

from bigdit.objective_spec import DdpmSpec


@cache
def alphas_cumprod(objective: DdpmSpec) -> tuple[float, ...]:
    """ᾱ of each timestep: x_t = √ᾱ x + √(1 - ᾱ) ε (Ho et al., arXiv:2006.11239, equation 4)."""
    alphas = _cumprod(objective)
    return _zero_terminal(alphas) if objective.zero_terminal_snr else alphas


def shifted_betas(objective: DdpmSpec) -> list[float]:
    """The betas whose signal-to-noise ratios are divided by `snr_shift`, before the last of them becomes 0."""
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
