"""CogView3-Plus: one sequence of T5's text and the image, conditioned on its size; padded text is attended to.

Source: Zheng et al., arXiv:2403.05121; diffusers' CogView3PlusTransformer2DModel and CogView3PlusPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.families.cogview4 import of_sizes
from bigdit.models.family import Conditions, Family, text


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D]; images are whole, uncropped."""
    embeds, _ = text(conditions)
    return of_sizes(model, latents, t, embeds)


FAMILY = Family("CogView3PlusTransformer2DModel", predict)
