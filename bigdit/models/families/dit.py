"""DiT: adaLN-Zero blocks conditioned on t and a class, as diffusers has it, with an embedder in each block.

Source: Peebles & Xie, arXiv:2212.09748; diffusers' DiTTransformer2DModel and DiTPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Extra, Family

# The published models see 1000 training timesteps.
TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Output [B, C, H, W] for square latents [B, C, H, W], t [B] and the extra class_label [B]; 2 C channels of a model
    with learned sigma.

    A label dropped for classifier-free guidance is the class after the last. The embedders' own dropout is off: each
    block would drop other labels, and a recomputed block others again.
    """
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.eval()
    return model(
        latents,
        timestep=t * TIMESTEP_SCALE,
        class_labels=conditions.extras["class_label"],
        return_dict=False,
    )[0]


def extras(model: nn.Module) -> dict[str, Extra]:
    """The class, 0 … num_embeds_ada_norm - 1, and num_embeds_ada_norm for none."""
    return {"class_label": Extra(shape=(), dtype=torch.int64)}


def shared(model: nn.Module) -> list[nn.Module]:
    """The first block's embedder, which the model calls once more after the last block."""
    return [model.transformer_blocks[0].norm1.emb]


FAMILY = Family("DiTTransformer2DModel", predict, extras=extras, shared=shared)
