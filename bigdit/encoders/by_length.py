"""Captions in batches of like lengths: what a batch is padded to is then little more than its captions need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bigdit.encoders.batch_size import BatchSize
from bigdit.encoders.text_encoder import Keep, as_it_is
from bigdit.store.text import Text


def encode_by_length(
    captions: Sequence[str],
    tokens: Sequence[int],
    size: BatchSize,
    encode: Callable[[Sequence[int]], Sequence[Text]],
    kept: Keep = as_it_is,
) -> list[Text]:
    """The texts of `captions` in their order; `encode` is given places of captions that have about as many `tokens`,
    and what it gives is `kept` before the next are encoded.

    The longest come first: where memory does not do, it is found out at once.
    """

    def keep(places: Sequence[int]) -> list[Text]:
        return [kept(text) for text in encode(places)]

    order = sorted(range(len(captions)), key=lambda place: (-tokens[place], captions[place]))
    texts = dict(zip(order, size.map(keep, order), strict=True))
    return [texts[place] for place in range(len(captions))]
