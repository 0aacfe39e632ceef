"""How each diffusers pipeline's `encode_prompt` answers, and what padding is to it.

Tokenizers, templates, layers and masks are the pipeline's own code: here stands only what its signature does not say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Padding = Literal["masked", "zeroed", "attended", "kept"]


@dataclass(frozen=True)
class Recipe:
    """`gives`: the names of what is returned, in order; `-` for what is not wanted, `null_…` of no caption.

    `padding`. masked: neither text encoder nor transformer see it, and a mask says where it is, or there is none.
    zeroed: the text encoder does not see it, and the transformer is given zeros. attended: the text encoder reads
    the padding, the transformer does not. kept: both do, or the transformer does.
    """

    gives: tuple[str, ...]
    padding: Padding

    @property
    def fits(self) -> bool:
        """Whether a batch may be padded to its longest caption: states of tokens are the same then."""
        return self.padding in ("masked", "zeroed")


_MASKED = Recipe(("states", "mask", "null_states", "null_mask"), "masked")
_ZEROED = Recipe(("states", "-", "null_states", "-"), "zeroed")

# Source: diffusers 0.42.1, `encode_prompt` and the transformer's call of each pipeline.
RECIPES: dict[str, Recipe] = {
    "AuraFlowPipeline": _ZEROED,
    "ChromaPipeline": Recipe(("states", "-", "mask", "null_states", "-", "null_mask"), "masked"),
    "CogVideoXPipeline": Recipe(("states", "null_states"), "kept"),
    "Flux2KleinPipeline": Recipe(("states", "-"), "kept"),
    "FluxPipeline": Recipe(("states", "pooled", "-"), "kept"),
    "HunyuanVideoPipeline": Recipe(("states", "pooled", "mask"), "masked"),
    "LTXPipeline": Recipe(("states", "mask", "null_states", "null_mask"), "attended"),
    "Lumina2Pipeline": _MASKED,
    "PixArtAlphaPipeline": _MASKED,
    "PixArtSigmaPipeline": _MASKED,
    "QwenImagePipeline": Recipe(("states", "mask"), "masked"),
    "SanaPipeline": _MASKED,
    "SanaSprintPipeline": Recipe(("states", "mask"), "masked"),
    "SanaVideoPipeline": _MASKED,
    "StableDiffusion3Pipeline": Recipe(("states", "null_states", "pooled", "null_pooled"), "kept"),
    "StableDiffusionXLPipeline": Recipe(("states", "null_states", "pooled", "null_pooled"), "kept"),
    "WanPipeline": Recipe(("states", "null_states"), "zeroed"),
    "ZImagePipeline": Recipe(("states", "null_states"), "masked"),
}
