"""What `encode_prompt` of each diffusers pipeline returns, and how it treats padding.

Tokenizers, templates, layers and masks are in the pipeline's own code. A recipe has what its signature does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Padding = Literal["masked", "zeroed", "attended", "kept"]


_OWN = ("-", "states", "mask", "pooled")
"""The names in `EncodingRecipe.gives` that are no further texts."""


@dataclass(frozen=True)
class EncodingRecipe:
    """How to encode captions by a pipeline.

    `gives`: the names of the returned values, in order. `-` is ignored. `null_…` is the unconditional text. Names other
    than `states`, `mask` and `pooled` are further texts. They have a mask `…_mask`, or are stored whole.

    `padding`. masked: neither text encoder nor transformer sees it, or there is none. zeroed: the text encoder does not
    see it, and the transformer gets zeros. attended: only the text encoder sees it. kept: the transformer sees it, even
    if there is a mask.

    `arguments`: further arguments of the call. `separate`: further texts that need their own call, by name. `rare`:
    texts that most captions do not have. `length`: the attribute with the length of captions, if it is no argument;
    `a.b` is an attribute of part a. `multiple`: lengths must be multiples of it. `alone`: captions are encoded one at a
    time, since results depend on the batch. `joined`: several layers are returned as [B, T, L, D], as features of one
    text. `settings`: keys of the folder's index that change texts.
    """

    gives: tuple[str, ...]
    padding: Padding
    arguments: Mapping[str, int] = field(default_factory=dict)
    separate: Mapping[str, EncodingRecipe] = field(default_factory=dict)
    rare: tuple[str, ...] = ()
    length: str | None = None
    multiple: int = 1
    alone: bool = False
    joined: bool = False
    settings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a batch may be padded to its longest caption without changing the states of tokens."""
        return self.padding in ("masked", "zeroed") and not self.alone

    def allowed(self, length: int) -> int:
        """The smallest allowed length that is at least `length`."""
        return -(-length // self.multiple) * self.multiple

    def set_in(self, index: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in the index of a pipeline's folder."""
        return {name: index[name] for name in self.settings if index.get(name) is not None}

    def keeps(self, name: str) -> bool:
        """Whether the padding of a further text is stored. "" stands for the text itself."""
        if name in self.separate:
            return self.separate[name].keeps("")
        return f"{name}_mask" not in self.gives if name else self.padding == "kept"

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the further texts that this call returns."""
        further = [name for name in self.gives if name not in _OWN and not name.startswith("null_")]
        return tuple(name for name in further if not name.endswith("_mask"))


_MASKED = EncodingRecipe(("states", "mask", "null_states", "null_mask"), "masked")
_NULL_MASKED = ("states", "null_states", "mask", "null_mask")
_ZEROED = EncodingRecipe(("states", "-", "null_states", "-"), "zeroed")

# Source: diffusers 0.42.1, `encode_prompt` and the transformer's call of each pipeline.
RECIPES: dict[str, EncodingRecipe] = {
    "AuraFlowPipeline": _ZEROED,
    "BriaPipeline": EncodingRecipe(("states", "null_states", "-"), "zeroed"),
    "ChromaPipeline": EncodingRecipe(("states", "-", "mask", "null_states", "-", "null_mask"), "masked"),
    "CogVideoXImageToVideoPipeline": EncodingRecipe(("states", "null_states"), "kept"),
    "CogVideoXPipeline": EncodingRecipe(("states", "null_states"), "kept"),
    "CogView3PlusPipeline": EncodingRecipe(("states", "null_states"), "kept"),
    "CogView4Pipeline": EncodingRecipe(  # pads to a multiple of 16, and to the longest; the transformer sees all
        ("states", "null_states"), "masked", alone=True, multiple=16
    ),
    "Flux2KleinPipeline": EncodingRecipe(("states", "-"), "kept"),
    "Flux2Pipeline": EncodingRecipe(("states", "-"), "kept"),
    "FluxControlPipeline": EncodingRecipe(("states", "pooled", "-"), "kept"),
    "FluxFillPipeline": EncodingRecipe(("states", "pooled", "-"), "kept"),
    "FluxKontextPipeline": EncodingRecipe(("states", "pooled", "-"), "kept"),
    "FluxPipeline": EncodingRecipe(("states", "pooled", "-"), "kept"),
    "HiDreamImagePipeline": EncodingRecipe(  # each block reads one of Llama's layers
        ("states", "null_states", "llama_text", "null_llama_text", "pooled", "null_pooled"), "kept"
    ),
    "HunyuanDiTPipeline": EncodingRecipe(  # mT5's pooler reads all states; attention follows the mask
        _NULL_MASKED,
        "kept",
        {"text_encoder_index": 1},
        {"clip_text": EncodingRecipe(_NULL_MASKED, "masked", {"text_encoder_index": 0})},
    ),
    "HunyuanImagePipeline": EncodingRecipe(  # ByT5 encodes text in quotes
        ("states", "mask", "glyph_text", "glyph_text_mask"),
        "masked",
        rare=("glyph_text",),
        length="tokenizer_max_length",
    ),
    **dict.fromkeys(
        ("HunyuanVideo15ImageToVideoPipeline", "HunyuanVideo15Pipeline"),
        EncodingRecipe(
            ("states", "mask", "glyph_text", "glyph_text_mask"),
            "masked",
            rare=("glyph_text",),
            length="tokenizer_max_length",
        ),
    ),
    "HunyuanVideoPipeline": EncodingRecipe(("states", "pooled", "mask"), "masked"),
    "Kandinsky5T2VPipeline": EncodingRecipe(  # cuts all captions if one is too long
        ("states", "pooled", "-"), "masked", alone=True
    ),
    "Krea2Pipeline": EncodingRecipe(  # pads within its template
        ("states", "mask"), "masked", joined=True, settings=("text_encoder_select_layers",)
    ),
    **dict.fromkeys(
        ("LTXConditionPipeline", "LTXImageToVideoPipeline", "LTXPipeline"),
        EncodingRecipe(("states", "mask", "null_states", "null_mask"), "attended"),
    ),
    "LongCatImagePipeline": EncodingRecipe(("states", "-"), "kept", length="tokenizer_max_length"),
    "Lumina2Pipeline": _MASKED,
    "LuminaPipeline": replace(_MASKED, length="max_sequence_length", multiple=8),
    "OvisImagePipeline": EncodingRecipe(("states", "null_states", "-", "-"), "zeroed"),
    "MochiPipeline": _MASKED,
    "PRXPipeline": replace(_MASKED, length="tokenizer.model_max_length"),
    "PixArtAlphaPipeline": _MASKED,
    "PixArtSigmaPipeline": _MASKED,
    **dict.fromkeys(
        ("QwenImageEditPipeline", "QwenImageEditPlusPipeline", "QwenImagePipeline"),
        EncodingRecipe(("states", "mask"), "masked"),
    ),
    "SanaPipeline": _MASKED,
    "SanaSprintPipeline": EncodingRecipe(("states", "mask"), "masked"),
    "SanaVideoPipeline": _MASKED,
    "StableDiffusion3Pipeline": EncodingRecipe(("states", "null_states", "pooled", "null_pooled"), "kept"),
    "StableDiffusionXLPipeline": EncodingRecipe(("states", "null_states", "pooled", "null_pooled"), "kept"),
    "WanImageToVideoPipeline": EncodingRecipe(("states", "null_states"), "zeroed"),
    "WanPipeline": EncodingRecipe(("states", "null_states"), "zeroed"),
    "ZImagePipeline": EncodingRecipe(("states", "null_states"), "masked"),
}
