"""The texts of captions that were encoded lately: data sets repeat their captions, and encoders are slow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bigdit.encoders.text_encoder import Keep, TextEncoder, as_it_is
from bigdit.encoders.turns import Turn, at_once
from bigdit.store.text import Text

CAPACITY_BYTES = 256 * 2**20
"""About 500 captions of Sana's (103 × 2304 in bf16 on the mean), or 90 of Stable Diffusion 3's (333 × 4096)."""


class TextCache:
    """An encoder whose texts are on the host in `dtype`, and of which at most so many bytes are kept between calls:
    the longest unused go first. It is asked in its `turn`."""

    def __init__(
        self,
        encoder: TextEncoder,
        dtype: torch.dtype = torch.bfloat16,
        capacity_bytes: int = CAPACITY_BYTES,
        turn: Turn = at_once,
    ) -> None:
        self._encoder = encoder
        self._turn = turn
        self._dtype = dtype
        self._capacity_bytes = capacity_bytes
        self._kept: OrderedDict[str, Text] = OrderedDict()
        self.nbytes = 0
        self.dim, self.pooled_dim, self.max_tokens = encoder.dim, encoder.pooled_dim, encoder.max_tokens
        self.streams = encoder.streams

    @property
    def identity(self) -> dict[str, Any]:
        """The encoder's."""
        return self._encoder.identity

    def modules(self) -> list[nn.Module]:
        """The encoder's."""
        return self._encoder.modules()

    def encode(self, captions: Sequence[str], kept: Keep = as_it_is) -> list[Text]:
        """Captions to their texts, each distinct one that is not known encoded once."""
        distinct = list(dict.fromkeys(captions))
        unknown = [caption for caption in distinct if caption not in self._kept]
        encoded = self._turn(lambda: self._encoder.encode(unknown, self._to_host)) if unknown else []
        texts = {caption: self._kept[caption] for caption in distinct if caption in self._kept}
        texts |= zip(unknown, encoded, strict=True)
        for caption in distinct:
            self._keep(caption, texts[caption])
        return [kept(texts[caption]) for caption in captions]

    def null(self) -> Text:
        """The encoder's."""
        return self._to_host(self._turn(self._encoder.null))

    def _to_host(self, text: Text) -> Text:
        return text.to("cpu", self._dtype)

    def _keep(self, caption: str, text: Text) -> None:
        """Put the text last, and let the first go until all fit."""
        if caption not in self._kept:
            self.nbytes += text.nbytes
        self._kept[caption] = text
        self._kept.move_to_end(caption)
        while self.nbytes > self._capacity_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes
