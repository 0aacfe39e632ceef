"""What describes a picture: a text, or JSON of one or several texts with weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bigdit.config.data import WEIGHTS, is_weight
from bigdit.files import IS_LFS_POINTER, is_lfs_pointer
from bigdit.sources.protocol import Caption, Unusable
from bigdit.units import how_many


def text_captions(data: bytes, name: str) -> tuple[Caption, ...]:
    """The whole of a `.txt` file as one caption. Raises Unusable where it is empty or not UTF-8."""
    return weighted([_decoded(data, name)], [1.0], name)


def json_captions(data: bytes, name: str) -> tuple[Caption, ...] | None:
    """The captions of a `.json` file; None for an object that has none, such as metadata of other programs.

    Forms: "text"; ["text", …]; {"caption": "text"}; {"captions": ["text", …], "weights": [number, …]}, weights 1
    where they are missing; other keys are ignored. Raises Unusable for what is not of these forms.
    """
    try:
        value: Any = json.loads(_decoded(data, name))
    except (ValueError, RecursionError):
        raise Unusable(f"caption {name} is not JSON") from None
    weights: Any = None
    if isinstance(value, dict):
        if not value.keys() & {"caption", "captions"}:
            return None
        value, weights = value.get("captions", value.get("caption")), value.get("weights")
    texts = value if isinstance(value, list) else [value]
    if weights is None:
        weights = [1.0] * len(texts)
    return weighted(texts, weights if isinstance(weights, list) else [weights], name)


def weighted(texts: Sequence[Any], weights: Sequence[Any], name: str) -> tuple[Caption, ...]:
    """Captions of texts and their weights, without those that are null, empty, or of weight 0.

    Raises Unusable where none is left, lengths differ, or values are not texts and weights.
    """
    if len(texts) != len(weights):
        raise Unusable(f"caption {name} has {how_many(len(texts), 'text')} and {how_many(len(weights), 'weight')}")
    captions = []
    for text, weight in zip(texts, weights, strict=True):
        if text is None:
            continue
        if not isinstance(text, str):
            raise Unusable(f"caption {name} holds {type(text).__name__}, not text")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not (weight == 0 or is_weight(weight)):
            raise Unusable(f"caption {name} has the weight {str(weight)[:20]}; weights are numbers, 0 or {WEIGHTS}")
        if text.strip() and weight:
            captions.append(Caption(_sound(text.strip(), name), float(weight)))
    if not captions:
        raise Unusable(f"caption {name} is empty")
    return tuple(captions)


def _decoded(data: bytes, name: str) -> str:
    if is_lfs_pointer(data):
        raise Unusable(f"caption {name} {IS_LFS_POINTER}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unusable(f"caption {name} is not UTF-8") from None


def _sound(text: str, name: str) -> str:
    """The text, if it can be written again: JSON can escape halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unusable(f"caption {name} is not UTF-8") from None
    return text
