"""Which samples make up which global batch: a pure function of (seed, step) and of the data's stages.

An epoch permutes the parts and cuts them into windows; the rows of a window are shuffled, so that reads stay within a
few files, and a window's plan takes no memory of the others. Each bucket is an endless stream of these rows, window
after window and epoch after epoch, cut into global batches: what remains at the end of a window or an epoch opens the
bucket's next batch, so that no sample is lost. The batches that end in a window, of all buckets, come in a shuffled
order. Data that is added later enters with an epoch: a stage says from which epoch on how many parts are read.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bigdit.loader.validation import ValidationSplit

Ints = npt.NDArray[np.int64]

WINDOW_PARTS = 64
"""Parts whose rows are shuffled among each other: 16 384 samples of parts of 256."""

_PARTS, _TURNS, _ROWS = 1, 2, 3  # what is drawn, so that no two draws share their random numbers


@dataclass(frozen=True)
class Stage:
    """From epoch `first_epoch` on, the first `parts` parts of the store are read."""

    first_epoch: int
    parts: int


@dataclass(frozen=True)
class GlobalBatch:
    """Samples of the bucket numbered `bucket`: `parts` and their `rows`, both int64 [global_batch_size]."""

    bucket: int
    parts: Ints
    rows: Ints


@dataclass(frozen=True)
class _Epoch:
    """`parts`: permuted; `before` [windows + 1, buckets]: samples of the epoch before each window; `batches`
    [windows + 1]: those that end in the epoch before each window's end."""

    parts: Ints
    before: Ints
    batches: Ints


class Order:
    """The order of training over `counts` int64 [parts, buckets]: samples of each shape in each part; none that is
    `held` out ever comes. It begins with `first_step` of the run, and is another one with another first step."""

    def __init__(
        self,
        counts: Ints,
        shapes: Sequence[tuple[int, ...]],
        global_batch_size: int,
        seed: int,
        *,
        stages: Sequence[Stage] = (),
        window_parts: int = WINDOW_PARTS,
        held: ValidationSplit | None = None,
        first_step: int = 0,
    ) -> None:
        counts = counts if held is None else counts - held.counts
        self.held = held
        self.global_batch_size = global_batch_size
        self.first_step = first_step
        self.stages = tuple(stages) or (Stage(0, len(counts)),)
        self._counts = counts
        self._shapes = tuple(shapes)
        self._seed = seed
        self._window_parts = window_parts
        self._totals = [counts[: stage.parts].sum(0) for stage in self.stages]
        self._before_stage = [np.zeros(counts.shape[1], np.int64)]
        for stage, following, total in zip(self.stages, self.stages[1:], self._totals, strict=False):
            self._before_stage.append(self._before_stage[-1] + (following.first_epoch - stage.first_epoch) * total)
        self.batches_before = functools.lru_cache(256)(self._count_batches_before)
        self._epoch = functools.lru_cache(2)(self._draw_epoch)
        self._turns = functools.lru_cache(2)(self._draw_turns)
        self._rows = functools.lru_cache(4 * len(self._shapes))(self._draw_rows)

    def epoch_of(self, step: int) -> int:
        """The epoch in which the batch of this step ends."""
        most = self.stages[-1].first_epoch + (step + len(self._shapes) + 1) * self.global_batch_size
        return bisect.bisect_right(range(most), step, key=self.batches_before) - 1

    def batch(self, step: int) -> GlobalBatch:
        """The samples of this step."""
        epoch = self.epoch_of(step)
        plan, place = self._epoch(epoch), step - self.batches_before(epoch)
        window = int(np.searchsorted(plan.batches, place, "right")) - 1
        turns = self._turns(epoch, window)
        turn = place - int(plan.batches[window])
        bucket = int(turns[turn])
        before = int(self._samples_before(epoch)[bucket] + plan.before[window, bucket])
        number = before // self.global_batch_size + int((turns[:turn] == bucket).sum())
        return self._cut(bucket, number * self.global_batch_size)

    def _cut(self, bucket: int, start: int) -> GlobalBatch:
        """The global batch that begins at place `start` of a bucket's stream."""
        parts, rows, missing = [], [], self.global_batch_size
        while missing:
            epoch = self._epoch_of_sample(bucket, start)
            before = self._epoch(epoch).before[:, bucket]
            place = start - int(self._samples_before(epoch)[bucket])
            window = int(np.searchsorted(before, place, "right")) - 1
            found = self._rows(epoch, window, bucket)[:, place - int(before[window]) :][:, :missing]
            parts.append(found[0])
            rows.append(found[1])
            start, missing = start + found.shape[1], missing - found.shape[1]
        return GlobalBatch(bucket, np.concatenate(parts), np.concatenate(rows))

    def _stage_of(self, epoch: int) -> int:
        return bisect.bisect_right(self.stages, epoch, key=lambda stage: stage.first_epoch) - 1

    def _samples_before(self, epoch: int) -> Ints:
        """Samples of each bucket in the epochs before this one."""
        number = self._stage_of(epoch)
        whole: Ints = self._before_stage[number] + (epoch - self.stages[number].first_epoch) * self._totals[number]
        return whole

    def _count_batches_before(self, epoch: int) -> int:
        """The step at which this epoch begins: the first one's, and the batches that end before it."""
        return self.first_step + int((self._samples_before(epoch) // self.global_batch_size).sum())

    def _epoch_of_sample(self, bucket: int, place: int) -> int:
        """The epoch of a place in a bucket's stream."""
        number = bisect.bisect_right(self._before_stage, place, key=lambda before: int(before[bucket])) - 1
        beyond = place - int(self._before_stage[number][bucket])
        return self.stages[number].first_epoch + beyond // int(self._totals[number][bucket])

    def _draw_epoch(self, epoch: int) -> _Epoch:
        parts = self._generator(_PARTS, epoch).permutation(self.stages[self._stage_of(epoch)].parts)
        starts = np.arange(0, len(parts), self._window_parts)
        before = np.zeros((len(starts) + 1, len(self._shapes)), np.int64)
        np.cumsum(np.add.reduceat(self._counts[parts], starts, axis=0), axis=0, out=before[1:])
        batches = ((self._samples_before(epoch) + before) // self.global_batch_size).sum(1)
        return _Epoch(parts, before, batches - batches[0])

    def _draw_turns(self, epoch: int, window: int) -> Ints:
        """The buckets of the batches that end in this window, shuffled."""
        samples = self._samples_before(epoch) + self._epoch(epoch).before[window : window + 2]
        counts = np.diff(samples // self.global_batch_size, axis=0)[0]
        turns = np.repeat(np.arange(len(counts)), counts)
        self._generator(_TURNS, epoch, window).shuffle(turns)
        return turns

    def _draw_rows(self, epoch: int, window: int, bucket: int) -> Ints:
        """Parts and rows [2, n] of a window's samples of a bucket, shuffled."""
        start = window * self._window_parts
        parts = self._epoch(epoch).parts[start : start + self._window_parts]
        ends = np.cumsum(self._counts[parts, bucket])
        # By the bucket's shape and not its number: data added later may bring other buckets.
        chosen = self._generator(_ROWS, epoch, window, *self._shapes[bucket]).permutation(int(ends[-1]))
        at = np.searchsorted(ends, chosen, "right")
        rows = chosen - (ends - self._counts[parts, bucket])[at]
        return np.stack([parts[at], rows if self.held is None else self.held.passed_over(bucket, parts[at], rows)])

    def _generator(self, *names: int) -> np.random.Generator:
        stage = (self.first_step,) if self.first_step else ()
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, *names), spawn_key=stage)))


def step_seed(seed: int, step: int) -> int:
    """The 63-bit seed of what an optimizer draws in `step`, alike on all processes: replicas of a weight stay equal."""
    return sample_seed(seed, step, -1)


def sample_seed(seed: int, step: int, position: int) -> int:
    """The 63-bit seed of all randomness of the sample at `position` in the global batch of `step`."""
    digest = hashlib.blake2b(f"{seed}/{step}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
