"""Training objectives: a loss, and the sampler that turns its prediction into samples. A new objective is a file.

Noise and t depend only on a sample's seed, so they are the same for every engine and split of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigdit.objective_spec import DdpmSpec, ObjectiveSpec
from bigdit.objectives import ddpm, flow_matching
from bigdit.objectives.prediction import Predict, draw_noise, of_latents
from bigdit.objectives.samplers import check_sampler, default_sampler, sample, scheduler_config


def loss(
    objective: ObjectiveSpec,
    predict: Predict,
    latents: torch.Tensor,
    seeds: Sequence[int],
    compute_dtype: torch.dtype,
    tokens: int,
    at: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The objective's loss, a scalar in fp32, for fp32 latents [B, C, (F,) H, W] and one seed per sample.

    `tokens`: the model's tokens per sample. `at`: this t in (0, 1) for all samples instead of random ones. `mask`
    [B, H, W]: the weight of the error at each place.
    """
    if isinstance(objective, DdpmSpec):
        return ddpm.loss(objective, predict, latents, seeds, compute_dtype, at, mask)
    return flow_matching.loss(objective, predict, latents, seeds, compute_dtype, tokens, at, mask)
