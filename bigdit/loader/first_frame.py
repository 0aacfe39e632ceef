"""What models that begin with a picture are fed of it, as it stands in a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bigdit.catalog.conditions import IMAGE_CONDITION
from bigdit.store.part import FIRST_FRAME


def mark_first(condition: torch.Tensor, mask: int) -> torch.Tensor:
    """Write the mask, 1 in the first latent frame, into so many first channels of [B, mask + C, f, h, w], in place.

    Source: diffusers 0.42.1, WanImageToVideoPipeline.prepare_latents.
    """
    condition[:, :mask] = 0
    condition[:, :mask, 0] = 1
    return condition


def extras_of(features: Mapping[str, torch.Tensor], mask: int) -> dict[str, torch.Tensor]:
    """The extras of a batch, of what encoders give of first frames [B, …]."""
    frames = features[FIRST_FRAME]
    condition = frames.new_empty(len(frames), mask + frames.shape[1], *frames.shape[2:])
    condition[:, mask:] = frames
    rest = {name: each for name, each in features.items() if name != FIRST_FRAME}
    return {IMAGE_CONDITION: mark_first(condition, mask), **rest}
