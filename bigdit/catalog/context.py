"""Context parallelism: how each class splits the tokens of a sample over processes, without torch.

For each class here, loss, gradients and steps equal those of one process (`tests/engines/test_context.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from bigdit.catalog.families import FAMILIES
from bigdit.strategy import ModelSpec, Strict


class Context(Strict):
    """How a class splits tokens.

    `splits`: for each module, the inputs (by name) or outputs (by number) to split, and the dimension of their tokens;
    a pair has one for each of two tensors. `gathers`: the module whose output [B, tokens, D] is gathered.

    `across`: the module of cross-attention to the text, which each process has whole; empty if one attention sees image
    and text. `text`: where the text is in that attention if it is not split.

    `linear`: self-attention is sums over tokens, and blocks convolve over rows of tokens, so whole rows are split.
    `patch_size`: used if the model's arguments have none.
    """

    splits: dict[str, dict[str | int, int | tuple[int, int]]]
    gathers: str = "proj_out"
    across: str = "attn2"
    text: Literal["first", "last"] | None = None
    linear: bool = False
    patch_size: int = 1

    @property
    def splits_text(self) -> bool:
        return any("encoder_hidden_states" in inputs for inputs in self.splits.values())


_FLUX = Context(splits={"": {"hidden_states": 1, "encoder_hidden_states": 1, "img_ids": 0, "txt_ids": 0}})
_BEFORE_BLOCKS = Context(splits={"transformer_blocks.0": {"hidden_states": 1}}, patch_size=2)

CONTEXTS: dict[str, Context] = {
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX,
    "QwenImageTransformer2DModel": Context(
        splits={
            "pos_embed": {0: 0, 1: 0},
            "transformer_blocks.0": {"hidden_states": 1, "encoder_hidden_states": 1},
            "transformer_blocks.*": {"encoder_hidden_states_mask": 1, "modulate_index": 1},
        }
    ),
    "WanTransformer3DModel": Context(splits={"rope": {0: 1, 1: 1}, "blocks.0": {"hidden_states": 1}}),
    "LTXVideoTransformer3DModel": Context(splits={"": {"hidden_states": 1}, "rope": {0: 1, 1: 1}}),
    "PixArtTransformer2DModel": _BEFORE_BLOCKS,
    "DiTTransformer2DModel": _BEFORE_BLOCKS.model_copy(update={"gathers": "proj_out_2"}),
    "SD3Transformer2DModel": _BEFORE_BLOCKS.model_copy(update={"across": "", "text": "last"}),
    "CogVideoXTransformer3DModel": Context(
        splits={"": {"image_rotary_emb": (0, 0)}, **_BEFORE_BLOCKS.splits}, across="", text="first", patch_size=2
    ),
    "HunyuanVideo15Transformer3DModel": Context(
        splits={"rope": {0: 0, 1: 0}, **_BEFORE_BLOCKS.splits}, across="", text="last"
    ),
    "SanaTransformer2DModel": _BEFORE_BLOCKS.model_copy(update={"linear": True, "patch_size": 1}),
}
"""Source of the first five: `_cp_plan` in diffusers 0.42.1; LTX-Video's also splits the text."""

DEGREES = (1, 2, 4, 8)
"""The values of strategy.cp."""

_PACKED = 2
"""Source: models/packing.py."""


def context_problems(model: ModelSpec, cp: int, ring: int | None = None) -> list[str]:
    """Why the model cannot split any sample over `cp` processes. `ring`: strategy.cp_ring; None for the least one that
    the model's heads allow."""
    if cp == 1:
        return []
    if model.class_name not in CONTEXTS:
        return [
            f"strategy.cp is {cp}, and bigdit does not know how to split the tokens of {model.class_name}; set it to "
            f"1, or use one of {', '.join(sorted(CONTEXTS))}"
        ]
    least = least_ring(model, cp)
    if ring is None or (ring == 1 if CONTEXTS[model.class_name].linear else ring % least == 0):
        return []
    if CONTEXTS[model.class_name].linear:
        return [f"strategy.cp_ring is {ring}, and {model.name} adds up tokens in place of attention; set it to 1"]
    heads = model.kwargs["num_attention_heads"]
    exchanged = f"strategy.cp {cp} / cp_ring {ring} = {cp // ring} does not divide"
    return [f"{exchanged} the {heads} heads of {model.name}; set strategy.cp_ring to {least}"]


def least_ring(model: ModelSpec, cp: int, per_node: int = DEGREES[-1]) -> int:
    """The least strategy.cp_ring: the part of `cp` that does not divide the model's heads or the GPUs of a machine."""
    heads = model.kwargs.get("num_attention_heads")
    if not isinstance(heads, int) or model.class_name not in CONTEXTS or CONTEXTS[model.class_name].linear:
        return 1
    return cp // math.gcd(cp, heads, per_node)


def context_misfits(model: ModelSpec, cp: int, shapes: Iterable[tuple[int, ...]], text_tokens: int | None) -> list[str]:
    """Why samples with these shapes of latents and `text_tokens` cannot be split over `cp` processes."""
    if cp == 1 or model.class_name not in CONTEXTS:
        return []
    what = "rows of tokens" if CONTEXTS[model.class_name].linear else "tokens"
    counts = {shape: _parts(model, shape) for shape in shapes}
    found = [
        f"strategy.cp is {cp}, and latents of {' × '.join(map(str, shape))} are {count:,} {what}; set it to "
        f"{_nearest(cp, count)}, or choose another size"
        for shape, count in counts.items()
        if count % cp
    ]
    if text_tokens is not None and text_tokens % cp and CONTEXTS[model.class_name].splits_text:
        found.append(
            f"strategy.cp is {cp}, and texts have {text_tokens} tokens; set encoders.text.max_tokens to "
            f"{-(-text_tokens // cp) * cp}, or cp to {_nearest(cp, text_tokens)}"
        )
    return found


def degrees(model: ModelSpec, shapes: Iterable[tuple[int, ...]], text_tokens: int | None) -> list[int]:
    """The values of strategy.cp that can split such samples."""
    sizes = [*shapes]
    return [
        cp for cp in DEGREES if not context_problems(model, cp) and not context_misfits(model, cp, sizes, text_tokens)
    ]


def _parts(model: ModelSpec, latents: tuple[int, ...]) -> int:
    """The number of tokens, or of rows of tokens, that are split."""
    if not CONTEXTS[model.class_name].linear:
        return token_count(model, latents)
    return latents[-2] // int(model.kwargs.get("patch_size") or CONTEXTS[model.class_name].patch_size)


def token_count(model: ModelSpec, latents: tuple[int, ...]) -> int:
    """The number of tokens of latents (C, H, W) or (C, F, H, W)."""
    context = CONTEXTS[model.class_name]
    side: Any = _PACKED if FAMILIES[model.class_name].packs else model.kwargs.get("patch_size") or context.patch_size
    patch: Iterable[int] = side if isinstance(side, list | tuple) else (side, side)
    return math.prod(latents[1:]) // math.prod(patch) // int(model.kwargs.get("patch_size_t") or 1)


def _nearest(cp: int, count: int) -> int:
    """The largest degree below `cp` that divides the count."""
    return next(each for each in reversed(DEGREES) if each < cp and count % each == 0)
