"""How t or a timestep is drawn, and how much of the image is left at it.

Flow matching draws t in (0, 1), 1 = noise, and shifts it by a sample's size: Esser et al., arXiv:2403.03206, section
3.1, equation 19 (logit-normal), 20 (mode) and 23 (the shift). The noise schedule of a DDPM, from 0 = almost the whole
image, is in python's floats, because losses read single numbers of it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from functools import cache

from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec, ExponentialShift, FlowMatchingSpec, SqrtShift

MOST_DRAWS = 100_000
"""Of one t, until it comes into t_range: a tenth of a second."""


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


def draw_t(objective: FlowMatchingSpec, seeds: Sequence[int], tokens: int) -> list[float]:
    """One t in (0, 1) a sample, from its seed alone, for samples of so many tokens."""
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
                f"objective.t_range is [{low:g}, {high:g}], and of {MOST_DRAWS:,} draws of t none came there; widen "
                "it, or change t_distribution or shift"
            )
        times.append(t)
    return times


def shift_of(objective: FlowMatchingSpec, tokens: int) -> float:
    """α of equation 23, for samples of so many tokens.

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
