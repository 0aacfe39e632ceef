"""Captions in batches of like lengths: what a batch is padded to is then little more than its captions need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bigdit.encoders.batch_size import BatchSize
from bigdit.store.text import Text


def encode_by_length(
    captions: Sequence[str],
    tokens: Sequence[int],
    size: BatchSize,
    encode: Callable[[Sequence[int]], Sequence[Text]],
) -> list[Text]:
    """The texts of `captions` in their order; `encode` is given places of captions that have about as many `tokens`.

    The longest come first: where memory does not do, it is found out at once.
    """
    order = sorted(range(len(captions)), key=lambda place: (-tokens[place], captions[place]))
    texts = dict(zip(order, size.map(encode, order), strict=True))
    return [texts[place] for place in range(len(captions))]
