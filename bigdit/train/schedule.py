"""The learning rate as a function of the step, so that a resumed run has nothing to restore."""

from __future__ import annotations

import math

from bigdit.config import RunConfig


def learning_rate(run: RunConfig, step: int) -> float:
    """The rate of step number `step` (from 0): linear warm-up to optimizer.lr, then what train.lr_schedule says."""
    train, peak = run.train, run.optimizer.lr
    if step < train.warmup_steps:
        return peak * (step + 1) / train.warmup_steps
    steps = train.known_steps
    fall = {"constant": 0, "cosine": steps - train.warmup_steps, "wsd": train.decay_steps or 0}[train.lr_schedule]
    past = step - (steps - fall)
    if past <= 0:
        return peak
    shape = _half_cosine if train.lr_schedule == "cosine" else _one_minus_root
    return train.min_lr + (peak - train.min_lr) * shape(past / fall)


def _half_cosine(done: float) -> float:
    """Source: Loshchilov & Hutter, arXiv:1608.03983, equation 5, without restarts."""
    return 0.5 * (1 + math.cos(math.pi * done))


def _one_minus_root(done: float) -> float:
    """Source: Hägele et al., arXiv:2405.18392, the cooldown "1 − sqrt"."""
    return 1 - math.sqrt(done)
