"""The paper's DiT, which bigdit implements itself: bigdit/models/paper_dit.py.

Source: Peebles & Xie, arXiv:2212.09748.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Extra, Family

# The published models see 1000 training timesteps.
TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Output [B, C, S, S] for latents of the model's own size, t [B] and the extra class_label [B]; 2 C channels of a
    model with learned sigma.

    A label dropped for classifier-free guidance comes as the class after the last.
    """
    return model(latents, t * TIMESTEP_SCALE, conditions.extras["class_label"])


def extras(model: nn.Module) -> dict[str, Extra]:
    """The class, 0 … num_classes - 1, and num_classes for none."""
    return {"class_label": Extra(shape=(), dtype=torch.int64)}


FAMILY = Family("PaperDiT", predict, lists=("blocks",), extras=extras)
