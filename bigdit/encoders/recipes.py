"""How each diffusers pipeline's `encode_prompt` answers, and what padding is to it.

Tokenizers, templates, layers and masks are the pipeline's own code: here stands only what its signature does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Padding = Literal["masked", "zeroed", "attended", "kept"]


_OWN = ("-", "states", "mask", "pooled")
"""What the names of `Recipe.gives` are where they are not those of further texts."""


@dataclass(frozen=True)
class Recipe:
    """`gives`: the names of what is returned, in order; `-` for what is not wanted, `null_…` of no caption; beside
    `states`, `mask` and `pooled` those of further texts, which come with a mask, `…_mask`, or are kept whole.

    `padding`. masked: neither text encoder nor transformer see it, and a mask says where it is, or there is none.
    zeroed: the text encoder does not see it, and the transformer is given zeros. attended: the text encoder reads
    the padding, the transformer does not. kept: both do, or the transformer does; with a mask, in one place of several.

    `asks`: further arguments of the call. `beside`: further texts that a call of their own gives, by name; `rare`:
    those that most captions have not. `length`: the attribute by which captions are cut, where it is no argument; with
    a dot, one of a part. `multiple`: they are cut at multiples of it alone. `alone`: they are encoded one at a time,
    for what is returned of one follows from those beside it. `joined`: several layers come as [B, T, L, D], features of
    one text. `settings`: what the folder's index says of texts beside the parts.
    """

    gives: tuple[str, ...]
    padding: Padding
    asks: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, Recipe] = field(default_factory=dict)
    rare: tuple[str, ...] = ()
    length: str | None = None
    multiple: int = 1
    alone: bool = False
    joined: bool = False
    settings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a batch may be padded to its longest caption: states of tokens are the same then."""
        return self.padding in ("masked", "zeroed") and not self.alone

    def taken(self, length: int) -> int:
        """The least length that captions can be cut at and that is as long."""
        return -(-length // self.multiple) * self.multiple

    def said(self, index: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that the index of a pipeline's folder has."""
        return {name: index[name] for name in self.settings if index.get(name) is not None}

    def keeps(self, name: str) -> bool:
        """Whether the padding of a further text is stored; of none: of the text itself."""
        if name in self.beside:
            return self.beside[name].keeps("")
        return f"{name}_mask" not in self.gives if name else self.padding == "kept"

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the further texts that this call gives."""
        further = [name for name in self.gives if name not in _OWN and not name.startswith("null_")]
        return tuple(name for name in further if not name.endswith("_mask"))


_MASKED = Recipe(("states", "mask", "null_states", "null_mask"), "masked")
_NULL_MASKED = ("states", "null_states", "mask", "null_mask")
_ZEROED = Recipe(("states", "-", "null_states", "-"), "zeroed")

# Source: diffusers 0.42.1, `encode_prompt` and the transformer's call of each pipeline.
RECIPES: dict[str, Recipe] = {
    "AuraFlowPipeline": _ZEROED,
    "BriaPipeline": Recipe(("states", "null_states", "-"), "zeroed"),
    "ChromaPipeline": Recipe(("states", "-", "mask", "null_states", "-", "null_mask"), "masked"),
    "CogVideoXPipeline": Recipe(("states", "null_states"), "kept"),
    "CogView3PlusPipeline": Recipe(("states", "null_states"), "kept"),
    "CogView4Pipeline": Recipe(  # which pads to a multiple of 16, and to the longest; the transformer is shown all
        ("states", "null_states"), "masked", alone=True, multiple=16
    ),
    "Flux2KleinPipeline": Recipe(("states", "-"), "kept"),
    "Flux2Pipeline": Recipe(("states", "-"), "kept"),
    "FluxPipeline": Recipe(("states", "pooled", "-"), "kept"),
    "HiDreamImagePipeline": Recipe(  # Llama's layers, which each block reads one of
        ("states", "null_states", "llama_text", "null_llama_text", "pooled", "null_pooled"), "kept"
    ),
    "HunyuanDiTPipeline": Recipe(  # mT5's pooler reads all states, and attention those that the mask shows
        _NULL_MASKED,
        "kept",
        {"text_encoder_index": 1},
        {"clip_text": Recipe(_NULL_MASKED, "masked", {"text_encoder_index": 0})},
    ),
    "HunyuanImagePipeline": Recipe(  # ByT5's of what stands in quotes
        ("states", "mask", "glyph_text", "glyph_text_mask"),
        "masked",
        rare=("glyph_text",),
        length="tokenizer_max_length",
    ),
    "HunyuanVideo15Pipeline": Recipe(
        ("states", "mask", "glyph_text", "glyph_text_mask"),
        "masked",
        rare=("glyph_text",),
        length="tokenizer_max_length",
    ),
    "HunyuanVideoPipeline": Recipe(("states", "pooled", "mask"), "masked"),
    "Kandinsky5T2VPipeline": Recipe(  # which cuts all where one is too long
        ("states", "pooled", "-"), "masked", alone=True
    ),
    "Krea2Pipeline": Recipe(  # which pads within its template
        ("states", "mask"), "masked", joined=True, settings=("text_encoder_select_layers",)
    ),
    "LTXPipeline": Recipe(("states", "mask", "null_states", "null_mask"), "attended"),
    "LongCatImagePipeline": Recipe(("states", "-"), "kept", length="tokenizer_max_length"),
    "Lumina2Pipeline": _MASKED,
    "LuminaPipeline": replace(_MASKED, length="max_sequence_length", multiple=8),
    "OvisImagePipeline": Recipe(("states", "null_states", "-", "-"), "zeroed"),
    "MochiPipeline": _MASKED,
    "PRXPipeline": replace(_MASKED, length="tokenizer.model_max_length"),
    "PixArtAlphaPipeline": _MASKED,
    "PixArtSigmaPipeline": _MASKED,
    "QwenImagePipeline": Recipe(("states", "mask"), "masked"),
    "SanaPipeline": _MASKED,
    "SanaSprintPipeline": Recipe(("states", "mask"), "masked"),
    "SanaVideoPipeline": _MASKED,
    "StableDiffusion3Pipeline": Recipe(("states", "null_states", "pooled", "null_pooled"), "kept"),
    "StableDiffusionXLPipeline": Recipe(("states", "null_states", "pooled", "null_pooled"), "kept"),
    "WanImageToVideoPipeline": Recipe(("states", "null_states"), "zeroed"),
    "WanPipeline": Recipe(("states", "null_states"), "zeroed"),
    "ZImagePipeline": Recipe(("states", "null_states"), "masked"),
}
