"""Texts of many lengths as tensors of a batch: states padded with zeros, and masks that say where there are some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bigdit.catalog.encoders import POOLED_TEXT
from bigdit.catalog.families import mask_of
from bigdit.loader.buffers import Buffers
from bigdit.store.digest import bytes_of
from bigdit.store.text import TEXT, Text


class Padded:
    """One sequence of a batch's texts: `states` [B, max_tokens, dim] bf16, in memory that is used again."""

    def __init__(self, buffers: Buffers, name: str, count: int, shape: tuple[int, int]) -> None:
        self.states, self._filled = buffers.take(name, (count, *shape), torch.bfloat16)
        self._memory = bytes_of(self.states)
        self._width, self._row = 2 * shape[1], 2 * shape[0] * shape[1]
        self._shown = [0] * count

    def room(self, place: int, tokens: int, shown: int) -> memoryview:
        """The memory of a sample's states, of which the mask shows so many; what follows them is zero."""
        start, nbytes = place * self._row, tokens * self._width
        if nbytes < self._filled[place]:
            self.states.view(-1).view(torch.uint8)[start + nbytes : start + self._filled[place]].zero_()
        self._filled[place] = nbytes
        self._shown[place] = shown
        return self._memory[start : start + nbytes]

    def mask(self) -> torch.Tensor:
        """[B, max_tokens] bf16: 1 where the mask shows a state."""
        return _mask(self._shown, self.states.shape[1], torch.bfloat16)


def padded(
    texts: Sequence[Text], max_tokens: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Texts as text_embeds [B, T, D], text_mask [B, T], and what stands beside them: vectors, and each stream with its
    mask; in their dtype and on their device, each sequence of `max_tokens`."""
    found = {name: _stacked([text.sequences[name] for text in texts], most) for name, most in max_tokens.items()}
    pooled = [text.pooled for text in texts if text.pooled is not None]
    extras = {POOLED_TEXT: torch.stack(pooled)} if pooled else {}
    own = found.pop(TEXT)
    for name, (states, mask) in found.items():
        extras |= {name: states, mask_of(name): mask}
    return *own, extras


def _stacked(texts: Sequence[Text], most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States, zero beyond each text's, and mask."""
    first = texts[0].states
    states = first.new_zeros(len(texts), most, first.shape[1])
    for row, text in zip(states, texts, strict=True):
        row[: len(text.states)] = text.states
    return states, _mask([text.shown for text in texts], most, first.dtype).to(first.device)


def _mask(shown: Sequence[int], tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, tokens]: 1 for so many states of each sample, then 0."""
    return (torch.arange(tokens) < torch.tensor(shown)[:, None]).to(dtype)
