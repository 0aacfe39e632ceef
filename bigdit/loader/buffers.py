"""CPU memory of batches, which is reused when a batch is dropped; and the layout of texts and first frames."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from bigdit.catalog.encoders import POOLED_TEXT
from bigdit.catalog.families import IMAGE_CONDITION, mask_of
from bigdit.store.part import FIRST_FRAME
from bigdit.store.tensors import bytes_of
from bigdit.store.text import TEXT, Text


class Buffers:
    """Tensors for a stream of batches. Each name has memory for the largest batch.

    Pageable tensors are views of memory that is reused when nothing refers to them, not even autograd. Pinned tensors
    come from torch's pool, which also waits until a GPU has read them.
    """

    def __init__(self, capacities: dict[str, int], *, pinned: bool) -> None:
        self._capacities = capacities
        self._pinned = pinned
        self._free: dict[tuple[str, int], deque[tuple[npt.NDArray[np.uint8], list[int]]]] = defaultdict(deque)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
        """A tensor [rows, …], and how many bytes of each row may differ from zero. The caller updates these numbers."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._pinned:
            return torch.empty(shape, dtype=dtype, pin_memory=True), [nbytes // shape[0]] * shape[0]
        free = self._free[name, shape[0]]
        try:
            memory, filled = free.pop()
        except IndexError:
            memory, filled = np.zeros(self._capacities[name], np.uint8), [0] * shape[0]
        view = memory[:nbytes]
        finalizer = weakref.finalize(view, free.append, (memory, filled))
        finalizer.atexit = False
        return torch.from_numpy(view).view(dtype).view(shape), filled


class Padded:
    """One sequence of a batch's texts: `states` [B, max_tokens, dim] bf16, in reused memory."""

    def __init__(self, buffers: Buffers, name: str, count: int, shape: tuple[int, int]) -> None:
        self.states, self._filled = buffers.take(name, (count, *shape), torch.bfloat16)
        self._memory = bytes_of(self.states)
        self._width, self._row = 2 * shape[1], 2 * shape[0] * shape[1]
        self._shown = [0] * count

    def room(self, place: int, tokens: int, shown: int) -> memoryview:
        """The memory of a sample's states. The mask shows `shown` of them. The rest of the row is zero."""
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
    """Texts as text_embeds [B, T, D], text_mask [B, T] and extras: vectors, and each stream with its mask.

    Dtype and device are those of the texts. `max_tokens`: the length of each sequence.
    """
    found = {name: _stacked([text.sequences[name] for text in texts], most) for name, most in max_tokens.items()}
    pooled = [text.pooled for text in texts if text.pooled is not None]
    extras = {POOLED_TEXT: torch.stack(pooled)} if pooled else {}
    own = found.pop(TEXT)
    for name, (states, mask) in found.items():
        extras |= {name: states, mask_of(name): mask}
    return *own, extras


def _stacked(texts: Sequence[Text], most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The states, padded with zeros, and their mask."""
    first = texts[0].states
    states = first.new_zeros(len(texts), most, first.shape[1])
    for row, text in enumerate(texts):
        states[row, : len(text.states)] = text.states
    return states, _mask([text.shown for text in texts], most, first.dtype).to(first.device)


def _mask(shown: Sequence[int], tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask [B, tokens]: 1 for the first `shown` states of each sample, then 0."""
    return (torch.arange(tokens) < torch.tensor(shown)[:, None]).to(dtype)


def mark_first(condition: torch.Tensor, mask: int) -> torch.Tensor:
    """Write the mask into the first `mask` channels of [B, mask + C, f, h, w], in place. It is 1 in the first latent
    frame. Source: diffusers 0.42.1, WanImageToVideoPipeline.prepare_latents."""
    condition[:, :mask] = 0
    condition[:, :mask, 0] = 1
    return condition


def extras_of(features: Mapping[str, torch.Tensor], mask: int) -> dict[str, torch.Tensor]:
    """The extras of a batch from encoded first frames [B, …]."""
    frames = features[FIRST_FRAME]
    condition = frames.new_empty(len(frames), mask + frames.shape[1], *frames.shape[2:])
    condition[:, mask:] = frames
    rest = {name: each for name, each in features.items() if name != FIRST_FRAME}
    return {IMAGE_CONDITION: mark_first(condition, mask), **rest}
