"""How flow matching draws t in (0, 1), 1 = noise, and shifts it by a sample's size.

Source: Esser et al., arXiv:2403.03206, section 3.1: equation 19 (logit-normal), 20 (mode) and 23 (the shift).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from bigdit.objective_spec import ExponentialShift, FlowMatchingSpec, SqrtShift


def draw_t(objective: FlowMatchingSpec, seeds: Sequence[int], tokens: int) -> list[float]:
    """One t in (0, 1) a sample, from its seed alone, for samples of so many tokens."""
    alpha = shift_of(objective, tokens)
    drawn = [_draw(objective, random.Random(seed)) for seed in seeds]
    return [alpha * t / (1.0 + (alpha - 1.0) * t) for t in drawn]


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
