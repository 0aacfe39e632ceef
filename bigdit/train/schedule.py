"""The learning rate as a function of the step, so that a resumed run has nothing to restore."""

from __future__ import annotations

import math

from bigdit.config import RunConfig


def learning_rate(run: RunConfig, step: int) -> float:
    """Linear warm-up, then constant, or a half cosine to zero (Loshchilov & Hutter, arXiv:1608.03983)."""
    train, peak = run.train, run.optimizer.lr
    if step < train.warmup_steps:
        return peak * (step + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return peak
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
