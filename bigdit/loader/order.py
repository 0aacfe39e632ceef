"""The samples of each global batch, a pure function of (seed, step) and of the stages of the data; and the validation
samples.

An epoch permutes the parts and cuts them into windows. The rows of a window are shuffled, so reads stay within a few
files. Each bucket is an endless stream of these rows, window after window and epoch after epoch. The stream is cut into
global batches. The rest of a window or an epoch begins the bucket's next batch, so no sample is lost. The batches of
all buckets that end in a window are shuffled. New data enters with an epoch: a stage has its first epoch and its number
of parts. Sources may have rates: a sample comes several times in an epoch, or once in several epochs.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from bigdit.store.part import shape_name
from bigdit.store.store import NO_ROWS, Index, Rows

Ints = npt.NDArray[np.int64]

WINDOW_PARTS = 64
"""Parts whose rows are shuffled together: 16 384 samples with parts of 256."""

_PARTS, _TURNS, _ROWS = 1, 2, 3  # keys of random generators


@dataclass(frozen=True)
class EpochStage:
    """From epoch `first_epoch` on, the first `parts` parts of the store are read, after its first `changes`.

    Rows that are `left_out` are not read. None: the validation samples are left out.
    """

    first_epoch: int
    parts: int
    changes: int = 0
    left_out: LeftOut | None = field(default=None, compare=False)


class Rates:
    """How often a sample of each source comes in an epoch. `of_sources`: the rates; further sources have rate 1.

    The samples of a part in a bucket repeat endlessly. Before epoch e, floor(e × rate × samples + phase) of them were
    taken. So over the epochs each sample comes equally often, and an epoch takes some of each source.
    """

    def __init__(self, of_sources: Sequence[Fraction], source_of_part: Ints) -> None:
        """`source_of_part`: int64 [parts], the number of the source of each part."""
        self.of_sources = tuple(of_sources)
        rates = [*of_sources, *[Fraction(1)] * int(source_of_part.max(initial=-1) + 1 - len(of_sources))]
        self._times = np.array([rate.numerator for rate in rates], np.int64)[source_of_part][:, None]
        self._of = np.array([rate.denominator for rate in rates], np.int64)[source_of_part][:, None]
        # Multiples of the golden ratio, so that small parts do not all come in the same epochs.
        golden = np.arange(len(source_of_part), dtype=np.uint64) * np.uint64(0x9E3779B9) & np.uint64(0xFFFFFFFF)
        self._phase = (golden[:, None] * self._of.astype(np.uint64) >> np.uint64(32)).astype(np.int64)
        self.whole = bool((self._of == 1).all())
        self.slowest = int(self._of.max(initial=1))

    def taken(self, counts: Ints, epoch: int, parts: Ints | slice) -> Ints:
        """Samples [parts, buckets] of `counts` [parts, buckets] that were taken before an epoch."""
        due = epoch * counts[parts] * self._times[parts] + self._phase[parts]
        return due // self._of[parts] if not self.whole else due

    def in_epoch(self, counts: Ints, epoch: int, parts: Ints | slice) -> Ints:
        """Samples [parts, buckets] that an epoch takes."""
        return self.taken(counts, epoch + 1, parts) - self.taken(counts, epoch, parts)

    def average(self, counts: Ints) -> list[Fraction]:
        """Samples of each bucket that an epoch of `counts` takes on average."""
        times, of = counts * self._times[: len(counts)], self._of[: len(counts), 0]
        found = [Fraction(0)] * counts.shape[1]
        for each in np.unique(of).tolist():
            sums = times[of == each].sum(0).tolist()
            found = [before + Fraction(more, each) for before, more in zip(found, sums, strict=True)]
        return found


@dataclass(frozen=True)
class GlobalBatch:
    """Samples of bucket number `bucket`: `parts` and their `rows`, both int64 [global_batch_size]."""

    bucket: int
    parts: Ints
    rows: Ints


@dataclass(frozen=True)
class _Epoch:
    """`parts`: permuted. `before` [windows + 1, buckets]: samples of the epoch before each window.

    `batches` [windows + 1]: batches of the epoch that end before each window.
    """

    parts: Ints
    before: Ints
    batches: Ints


class Order:
    """The order of training over `counts` int64 [parts, buckets], the rows of each shape in each part.

    It has no sample of `validation`. It begins with `first_step` of the run, and depends on it. `rates`: how often an
    epoch has the samples of each part.
    """

    def __init__(
        self,
        counts: Ints,
        shapes: Sequence[tuple[int, ...]],
        global_batch_size: int,
        seed: int,
        *,
        stages: Sequence[EpochStage] = (),
        window_parts: int = WINDOW_PARTS,
        validation: ValidationSplit | None = None,
        first_step: int = 0,
        rates: Rates | None = None,
    ) -> None:
        self.validation = validation
        self.global_batch_size = global_batch_size
        self.first_step = first_step
        self.stages = tuple(stages) or (EpochStage(0, len(counts)),)
        self._left_out = [validation if stage.left_out is None else stage.left_out for stage in self.stages]
        self._counts = [counts if out is None else counts - out.counts for out in self._left_out]
        self._shapes = tuple(shapes)
        self._seed = seed
        self._window_parts = window_parts
        self.rates = rates or Rates((), np.zeros(len(counts), np.int64))
        self._totals = [
            self.rates.in_epoch(own, 0, slice(stage.parts)).sum(0)
            for own, stage in zip(self._counts, self.stages, strict=True)
        ]
        self._before_stage = [np.zeros(counts.shape[1], np.int64)]
        self._samples_before = functools.lru_cache(256)(self._count_samples_before)
        for number, following in enumerate(self.stages[1:]):
            self._before_stage.append(self._in_stage(number, following.first_epoch))
        self.batches_before = functools.lru_cache(256)(self._count_batches_before)
        self._epoch = functools.lru_cache(2)(self._draw_epoch)
        self._turns = functools.lru_cache(2)(self._draw_turns)
        self._rows = functools.lru_cache(4 * len(self._shapes))(self._draw_rows)

    @property
    def samples_of_epoch(self) -> list[Fraction]:
        """Samples of each bucket that an epoch of the last stage has on average."""
        return self.rates.average(self._counts[-1])

    def epoch_of(self, step: int) -> int:
        """The epoch in which the batch of this step ends."""
        samples = (step + len(self._shapes) + 1) * self.global_batch_size
        most = self.stages[-1].first_epoch + self._epochs_of(samples)
        return bisect.bisect_right(range(most), step, key=self.batches_before) - 1

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of this step."""
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

    def _count_samples_before(self, epoch: int) -> Ints:
        """Samples of each bucket in the epochs before this one."""
        return self._in_stage(self._stage_of(epoch), epoch)

    def _in_stage(self, number: int, epoch: int) -> Ints:
        """Samples of each bucket before an epoch, if stage `number` lasts until then."""
        stage, before = self.stages[number], self._before_stage[number]
        if self.rates.whole:  # faster, since it needs no sum over parts
            whole: Ints = before + (epoch - stage.first_epoch) * self._totals[number]
            return whole
        now, then = (
            self.rates.taken(self._counts[number], each, slice(stage.parts)) for each in (epoch, stage.first_epoch)
        )
        found: Ints = before + (now - then).sum(0)
        return found

    def _epochs_of(self, samples: int) -> int:
        """So many epochs have at least `samples` of any bucket."""
        return samples if self.rates.whole else (samples + self._counts[0].size) * self.rates.slowest

    def _count_batches_before(self, epoch: int) -> int:
        """The step at which this epoch begins: `first_step` and the batches that end before it."""
        return self.first_step + int((self._samples_before(epoch) // self.global_batch_size).sum())

    def _epoch_of_sample(self, bucket: int, place: int) -> int:
        """The epoch of a place in a bucket's stream."""
        number = bisect.bisect_right(self._before_stage, place, key=lambda before: int(before[bucket])) - 1
        beyond, first = place - int(self._before_stage[number][bucket]), self.stages[number].first_epoch
        if self.rates.whole:
            return first + beyond // int(self._totals[number][bucket])
        epochs = range(first, first + self._epochs_of(beyond + 1) + 1)
        later = bisect.bisect_right(epochs, place, key=lambda epoch: int(self._samples_before(epoch)[bucket]))
        return epochs[later - 1]

    def _draw_epoch(self, epoch: int) -> _Epoch:
        stage = self._stage_of(epoch)
        parts = self._generator(_PARTS, epoch).permutation(self.stages[stage].parts)
        starts = np.arange(0, len(parts), self._window_parts)
        before = np.zeros((len(starts) + 1, len(self._shapes)), np.int64)
        taken = self.rates.in_epoch(self._counts[stage], epoch, parts)
        np.cumsum(np.add.reduceat(taken, starts, axis=0), axis=0, out=before[1:])
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
        stage = self._stage_of(epoch)
        counts, left_out = self._counts[stage], self._left_out[stage]
        taken = self.rates.in_epoch(counts, epoch, parts)[:, bucket]
        ends = np.cumsum(taken)
        # The key is the bucket's shape, not its number, since new data may have other buckets.
        chosen = self._generator(_ROWS, epoch, window, *self._shapes[bucket]).permutation(int(ends[-1]))
        at = np.searchsorted(ends, chosen, "right")
        places = chosen - (ends - taken)[at] + self.rates.taken(counts, epoch, parts)[at, bucket]
        rows = places % counts[parts[at], bucket]
        return np.stack([parts[at], rows if left_out is None else left_out.renumber(bucket, parts[at], rows)])

    def _generator(self, *names: int) -> np.random.Generator:
        stage = (self.first_step,) if self.first_step else ()
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, *names), spawn_key=stage)))


def dealt(lengths: Ints, passes: int, processes: int) -> Ints:
    """Places in a global batch [passes, processes, micro-batch] that give all processes equal work in each pass.

    `lengths` [global batch]: of texts. A pass takes texts of similar lengths, since a model may pad a micro-batch to
    its longest text. The texts, longest first, go to the processes in order, then in reverse order, and so on.
    """
    rounds = np.argsort(-lengths, kind="stable").reshape(passes, -1, processes)
    rounds[:, 1::2] = rounds[:, 1::2, ::-1]
    return rounds.swapaxes(1, 2)


def step_seed(seed: int, step: int) -> int:
    """The 63-bit seed of an optimizer's random numbers in `step`. It is equal on all processes, as replicas must be."""
    return sample_seed(seed, step, -1)


def sample_seed(seed: int, step: int, position: int) -> int:
    """The 63-bit seed of all randomness of the sample at `position` in the global batch of `step`."""
    digest = hashlib.blake2b(f"{seed}/{step}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def draw(seed: int, purpose: bytes) -> float:
    """A random number in [0, 1) from a sample's seed. It differs for each purpose."""
    return float(xxhash.xxh3_64_intdigest(purpose, seed) / 2**64)


_PARTS_AT_ONCE = 4096
"""A million samples with parts of 256. Digests of a whole large store would take more memory than its index."""


class ValidationSamples(NamedTuple):
    """Samples of bucket number `bucket`: int64 `parts`, their `rows`, and a seed each."""

    bucket: int
    parts: Ints
    rows: Ints
    seeds: tuple[int, ...]


class LeftOut:
    """Rows that are not trained on. `counts`: int64 [parts, buckets]."""

    def __init__(self, index: Index, rows: Rows) -> None:
        self.counts = np.zeros_like(index.counts)
        found = np.unique(np.stack([rows.buckets, rows.parts, rows.rows]), axis=1)  # sorted
        np.add.at(self.counts, (found[1], found[0]), 1)
        self.rows = Rows(*found)
        self._of_bucket = {
            bucket: (found[1, here], found[2, here])
            for bucket in np.unique(found[0]).tolist()
            for here in (found[0] == bucket,)
        }

    def renumber(self, bucket: int, parts: Ints, rows: Ints) -> Ints:
        """Convert rows that are numbered without the left-out ones to their numbers among all rows of their parts."""
        if bucket not in self._of_bucket:
            return rows
        (places, others), found = self._of_bucket[bucket], rows.copy()
        for part in np.intersect1d(parts, places):
            out, here = others[places == part], parts == part
            found[here] += np.searchsorted(out - np.arange(len(out)), rows[here], "right")
        return found


class ValidationSplit(LeftOut):
    """Validation samples, which are never trained on: the `samples` with the least digests in the first `parts` parts.

    A digest is made from the part's place in the source, the bucket's shape and the row. It does not depend on seed,
    later parts, other buckets or the number of processes. Rows that are `gone` are not chosen.
    """

    def __init__(self, index: Index, parts: int, samples: int, gone: Rows = NO_ROWS) -> None:
        chosen = _least(index, parts, samples, gone)
        super().__init__(index, Rows(chosen["bucket"], chosen["part"], chosen["row"]))
        self.chosen = [
            ValidationSamples(bucket, here["part"], here["row"], tuple((here["digest"] >> 1).tolist()))
            for bucket in range(len(index.shapes))
            if len(here := chosen[chosen["bucket"] == bucket])
        ]


_SAMPLE = np.dtype([("bucket", "i8"), ("part", "i8"), ("row", "i8"), ("digest", "u8")])


def _least(index: Index, parts: int, samples: int, gone: Rows) -> npt.NDArray[np.void]:
    """The samples with the least digests that are not `gone`, sorted by bucket, part and row."""
    least = np.empty(0, _SAMPLE)
    out = set(zip(*(column.tolist() for column in gone), strict=True))
    for found in _digested(index, parts):
        if out:
            places = zip(found["bucket"].tolist(), found["part"].tolist(), found["row"].tolist(), strict=True)
            found = found[[place not in out for place in places]]
        least = np.concatenate([least, found])
        if len(least) > samples:
            least = least[np.argpartition(least["digest"], samples - 1)[:samples]]
    return np.sort(least, order=("bucket", "part", "row"))


def _digested(index: Index, parts: int) -> Iterator[npt.NDArray[np.void]]:
    """All samples of the first parts with their digests, a few parts at a time."""
    for bucket, shape in enumerate(index.shapes):
        name = np.uint64(xxhash.xxh3_64_intdigest(shape_name(shape).encode()))
        for first in range(0, parts, _PARTS_AT_ONCE):
            numbers = np.arange(first, min(first + _PARTS_AT_ONCE, parts))
            counts = index.counts[numbers, bucket]
            found = np.empty(int(counts.sum()), _SAMPLE)
            found["bucket"], found["part"] = bucket, np.repeat(numbers, counts)
            found["row"] = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
            starts = index.parts[found["part"], 0].astype(np.uint64)
            found["digest"] = _mixed(_mixed(starts ^ name) + found["row"].astype(np.uint64))
            yield found


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit numbers in which each bit depends on all.

    Source: SplitMix64's; Steele, Lea & Flood, Fast splittable pseudorandom number generators (OOPSLA 2014), figure 16.
    """
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
