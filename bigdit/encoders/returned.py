"""What a pipeline's `encode_prompt` returned, as texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bigdit.catalog.families import mask_of
from bigdit.encoders.recipes import Padding, Recipe
from bigdit.errors import UserError
from bigdit.store.text import Text


def by_name(recipe: Recipe, returned: Sequence[Any]) -> dict[str, Any]:
    """What was returned by the recipe's names: [B, …] each, of several layers [L, B, T, D] as [B, L T, D], or joined
    ones [B, T, L, D] as [B, T, L D]."""
    given = dict(zip(recipe.gives, returned, strict=True))
    layers = {
        name: each.flatten(2) if recipe.joined else each.transpose(0, 1).flatten(1, 2)
        for name, each in given.items()
        if isinstance(each, torch.Tensor) and each.dim() == 4
    }
    return given | layers


def shape_of(states: torch.Tensor) -> tuple[int, int]:
    """The states of a caption [B, T, D], padded, and their width."""
    _, tokens, dim = states.shape
    return tokens, dim


def texts_of(recipe: Recipe, given: Mapping[str, Any], prefix: str = "") -> list[Text]:
    """The texts of what was returned, of the names that begin with `prefix`."""
    texts = _sequences(given[f"{prefix}states"], given.get(f"{prefix}mask"), recipe.padding)
    pooled = given.get(f"{prefix}pooled")
    if pooled is not None:
        texts = [replace(text, pooled=vector.clone()) for text, vector in zip(texts, pooled, strict=True)]
    streams = {}
    for name in recipe.streams:
        mask = given.get(f"{prefix}{mask_of(name)}")
        streams[name] = _sequences(given[f"{prefix}{name}"], mask, "kept" if mask is None else "masked")
    return with_streams(texts, streams)


def with_streams(texts: Sequence[Text], streams: Mapping[str, Sequence[Text]]) -> list[Text]:
    """The texts with further streams: of each name one a text."""
    return [
        replace(text, streams={**text.streams, **{name: each[i] for name, each in streams.items()}})
        for i, text in enumerate(texts)
    ]


def _sequences(states: Any, mask: torch.Tensor | None, padding: Padding) -> list[Text]:
    """A copy of each caption's states [T, dim], without padding where it is not kept."""
    if padding == "zeroed":
        return [Text(each[: int(each.any(dim=1).sum())].clone()) for each in states]
    if mask is None:
        return [Text(each.clone()) for each in states]
    if padding != "kept":
        return [Text(each[shown.bool()]) for each, shown in zip(states, mask, strict=True)]
    return [Text(each.clone(), seen=_shown(shown)) for each, shown in zip(states, mask, strict=True)]


def _shown(mask: torch.Tensor) -> int:
    """How many states a mask [T] shows. Raises UserError where they are not the first ones."""
    shown = int(mask.sum())
    if not mask[:shown].all():
        raise UserError("encoders.text.pipeline: a tokenizer there pads on the left, and on the right was expected")
    return shown
