"""How many samples an encoder is given at once: halved where memory runs out, and raised again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from bigdit.errors import UserError
from bigdit.shortage import ran_out

T = TypeVar("T")
R = TypeVar("R")

CPU_BATCH = 16
"""Where nothing is known of the device's memory; on a CPU, more cost memory and gain no speed."""

_PATIENCE = 8  # batches that must do before a larger one is tried; twice as many after each failure


class OneIsTooMuch(UserError):
    """Memory does not do for one sample."""


class BatchSize:
    """At most `most` samples in a batch; `size` is what memory allows at the moment."""

    def __init__(self, most: int) -> None:
        self.most = self.size = most
        self._patience, self._well = _PATIENCE, 0

    def map(self, encode: Callable[[Sequence[T]], Sequence[R]], samples: Sequence[T]) -> list[R]:
        """`encode` of all samples, in batches, in order: one result a sample.

        Raises OneIsTooMuch where memory does not do for one sample.
        """
        results: list[R] = []
        while len(results) < len(samples):
            batch = samples[len(results) : len(results) + self.size]
            encoded = self._attempt(encode, batch)
            if encoded is None:
                self._shrink(len(batch))
            else:
                results += encoded
                self._grow(len(batch))
        return results

    def _attempt(self, encode: Callable[[Sequence[T]], Sequence[R]], batch: Sequence[T]) -> Sequence[R] | None:
        """What `encode` gives, None where memory ran out. The error, which holds what was allocated, ends here."""
        try:
            return encode(batch)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            return None

    def _shrink(self, failed: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the larger batch left in pieces
        if failed == 1:
            raise OneIsTooMuch(
                "encoders.batch_size: memory does not do for one sample at a time; smaller data.buckets, bf16 as "
                "the encoders' dtype, encoders.image.tiling, or fewer workers take less"
            )
        self.size = failed // 2
        self._patience, self._well = 2 * self._patience, 0

    def _grow(self, done: int) -> None:
        self._well += done == self.size
        if self.size < self.most and self._well >= self._patience:
            self.size, self._well = min(2 * self.size, self.most), 0
