"""The texts of captions that were encoded lately: data sets repeat their captions, and encoders are slow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch

from bigdit.features.text import Text, TextEncoder


class TextCache:
    """Texts on the host in `dtype`, at most `capacity_bytes` of them between calls; the longest unused go first."""

    def __init__(self, encoder: TextEncoder, dtype: torch.dtype, capacity_bytes: int = 256 * 2**20) -> None:
        self._encoder = encoder
        self._dtype = dtype
        self._capacity_bytes = capacity_bytes
        self._kept: OrderedDict[str, Text] = OrderedDict()
        self.nbytes = 0

    def encode(self, captions: Iterable[str]) -> dict[str, Text]:
        """The text of each distinct caption, in the order of their first mention."""
        distinct = list(dict.fromkeys(captions))
        unknown = [caption for caption in distinct if caption not in self._kept]
        texts = zip(unknown, self._encoder.encode(unknown), strict=True) if unknown else ()
        fresh = {caption: text.to("cpu", self._dtype) for caption, text in texts}
        wanted = {caption: fresh.get(caption) or self._kept[caption] for caption in distinct}
        for caption, text in wanted.items():
            self._keep(caption, text)
        return wanted

    def _keep(self, caption: str, text: Text) -> None:
        """Put the text last, and let the first go until all fit."""
        if caption not in self._kept:
            self.nbytes += text.nbytes
        self._kept[caption] = text
        self._kept.move_to_end(caption)
        while self.nbytes > self._capacity_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes
