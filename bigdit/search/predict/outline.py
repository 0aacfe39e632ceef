"""The predicted step of one engine at full depth: memory at every moment, work and host, for any micro-batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from bigdit.memory import CATEGORIES, Category
from bigdit.search.predict.gap import Gap
from bigdit.search.predict.moments import Bytes
from bigdit.speed.work import Work

FIRST_SIZE = 2
"""The micro-batch size that the lines start from. At 1, torch takes some tensors for contiguous that are not so at
any other size."""

SECOND_SIZE = 2 * FIRST_SIZE
"""The one that they go through, and may bend at."""

OF_ACTIVATIONS = ("encode", "forward", "backward")


@dataclass(frozen=True)
class Line:
    """Numbers (or arrays of them) that grow by `slope` with each sample of the micro-batch, and by `bend` more with
    each beyond SECOND_SIZE: where tensors alone are counted, that is none."""

    start: Bytes
    slope: Bytes
    bend: Bytes = field(default_factory=lambda: np.asarray(0.0))

    def at(self, micro_batch_size: float) -> Bytes:
        """The numbers at that micro-batch size."""
        beyond = max(micro_batch_size - SECOND_SIZE, 0.0)
        value: Bytes = self.start + (micro_batch_size - FIRST_SIZE) * self.slope + beyond * self.bend
        return value

    def moment(self, number: int) -> Line:
        """Those of one moment, which are the last axis."""
        bend = self.bend[..., number] if self.bend.ndim else self.bend
        return Line(self.start[..., number], self.slope[..., number], bend)

    def __add__(self, other: Line) -> Line:
        return Line(self.start + other.start, self.slope + other.slope, self.bend + other.bend)


def level(value: Bytes) -> Line:
    """The same at any micro-batch size."""
    return Line(np.asarray(value), np.zeros_like(value))


@dataclass(frozen=True)
class Outline:
    """One checkpointing policy of one strategy.

    `live` are bytes at the moments of each span (see moments.Family), and `parts` these by category; `saved` what one
    block of each list keeps from the forward to the backward pass; `host` the host's peaks (HostMemory.saving);
    `gap` what the allocator reserves beyond the peak, of the deepest sibling: the model itself leaves more pieces,
    which is found when the best are confirmed. `farthest`: the largest micro-batch size that was rehearsed.
    """

    phases: tuple[str, ...]
    live: tuple[Line, ...]
    parts: tuple[Line, ...]
    saved: Mapping[str, Line]
    host: Line
    gap: Gap
    work: tuple[Work, Work]
    params: int
    farthest: int = SECOND_SIZE
    # A search asks time and again, of the same few sizes with other numbers of recomputed blocks.
    _peaks: dict[float, dict[str, float]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _works: dict[float, Work] = field(default_factory=dict, init=False, compare=False, repr=False)

    def peaks(self, micro_batch_size: float) -> Mapping[str, float]:
        """The highest bytes of each phase."""
        if micro_batch_size not in self._peaks:
            found: dict[str, float] = {}
            for phase, live in zip(self.phases, self.live, strict=True):
                found[phase] = max(found.get(phase, 0.0), float(live.at(micro_batch_size).max()))
            self._peaks[micro_batch_size] = found
        return self._peaks[micro_batch_size]

    def at_peak(self, micro_batch_size: float) -> dict[str, Bytes]:
        """What is live at the highest moment of each phase, by category in the order of CATEGORIES."""
        highest: dict[str, float] = {}
        found: dict[str, Bytes] = {}
        for phase, live, parts in zip(self.phases, self.live, self.parts, strict=True):
            now = live.at(micro_batch_size)
            number = int(now.argmax())
            if now[number] > highest.get(phase, 0.0):
                highest[phase] = float(now[number])
                found[phase] = parts.moment(number).at(micro_batch_size)
        return found

    def reaches(self, micro_batch_size: float) -> bool:
        """Whether what it says of that size can be off by a sample at most: kernels' scratch, which need not grow as it
        is continued from `farthest`, is no more there; and where a step does more in more samples, whose pieces are
        not continued at all, it is less than twice `farthest`."""
        if micro_batch_size <= self.farthest:
            return True
        if not self.gap.continued:
            return micro_batch_size < 2 * self.farthest
        found = self.at_peak(micro_batch_size)
        deciding = max(found, key=lambda phase: float(found[phase].sum()))
        grown = found[deciding] - self.at_peak(self.farthest)[deciding]
        of_a_sample = float(grown.sum()) / (micro_batch_size - self.farthest)
        return abs(float(grown[CATEGORIES.index("workspace")])) <= of_a_sample

    def work_at(self, micro_batch_size: float) -> Work:
        """What one step does."""
        if micro_batch_size not in self._works:
            start, slope = self.work
            self._works[micro_batch_size] = start + slope * (micro_batch_size - FIRST_SIZE)
        return self._works[micro_batch_size]


@dataclass(frozen=True)
class Arrangement:
    """An engine with an optimizer: its outlines without checkpointing and with all blocks checkpointed.

    `blocks` are the lists of blocks that can be checkpointed with their lengths, in the order of the forward pass.
    """

    none: Outline
    full: Outline
    blocks: tuple[tuple[str, int], ...]

    @property
    def count(self) -> int:
        return sum(length for _, length in self.blocks)

    def peaks(self, micro_batch_size: float, checkpointed: int) -> Mapping[str, float]:
        """Bytes of each phase with the first `checkpointed` blocks recomputed.

        Until the backward pass comes to those blocks it is as without checkpointing, less what they did not save;
        from there on all behind them is freed, as it is with all of them checkpointed.
        """
        if checkpointed >= self.count:
            return self.full.peaks(micro_batch_size)
        plain = self.none.peaks(micro_batch_size)
        if checkpointed == 0:
            return plain
        less = self.spared(micro_batch_size, checkpointed)
        recomputed = self.full.peaks(micro_batch_size)
        return {**recomputed} | {
            phase: max(recomputed[phase], plain[phase] - less) for phase in OF_ACTIVATIONS if phase in plain
        }

    def at_peak(self, micro_batch_size: float, checkpointed: int) -> tuple[str, dict[Category, int]]:
        """The phase that decides, and what is live at its peak by category; found as `peaks` are."""
        found = self._at_peaks(micro_batch_size, checkpointed)
        deciding = max(found, key=lambda phase: float(found[phase].sum()))
        parts = {name: round(float(nbytes)) for name, nbytes in zip(CATEGORIES, found[deciding], strict=True)}
        return deciding, {name: nbytes for name, nbytes in parts.items() if nbytes > 0}

    def _at_peaks(self, micro_batch_size: float, checkpointed: int) -> dict[str, Bytes]:
        if checkpointed >= self.count:
            return self.full.at_peak(micro_batch_size)
        plain = self.none.at_peak(micro_batch_size)
        if checkpointed == 0:
            return plain
        less = np.zeros(len(CATEGORIES))
        less[CATEGORIES.index("saved activation")] = self.spared(micro_batch_size, checkpointed)
        recomputed = self.full.at_peak(micro_batch_size)
        either = {phase: (recomputed[phase], plain[phase] - less) for phase in OF_ACTIVATIONS if phase in plain}
        return recomputed | {phase: max(two, key=lambda parts: float(parts.sum())) for phase, two in either.items()}

    def spared(self, micro_batch_size: float, checkpointed: int) -> float:
        """Bytes that the first `checkpointed` blocks do not save."""
        spared, left = 0.0, checkpointed
        for name, length in self.blocks:
            first = min(left, length)
            left -= first
            if name in self.none.saved:
                each = self.none.saved[name].at(micro_batch_size) - self.full.saved[name].at(micro_batch_size)
                spared += first * float(each)
        return spared

    def reserved(self, micro_batch_size: float, checkpointed: int) -> float:
        """Bytes that the allocator is expected to reserve."""
        gap = max(self.none.gap.at(micro_batch_size), self.full.gap.at(micro_batch_size))
        return max(self.peaks(micro_batch_size, checkpointed).values()) + gap

    def work(self, micro_batch_size: float, checkpointed: int) -> Work:
        """What one step does with that many blocks recomputed, each costing the same."""
        share = checkpointed / max(self.count, 1)
        none, full = self.none.work_at(micro_batch_size), self.full.work_at(micro_batch_size)
        return none * (1 - share) + full * share

    def host(self, micro_batch_size: float, checkpointed: int) -> float:
        """The most bytes of the host, as the process starts, steps or saves."""
        outline = self.full if checkpointed else self.none
        return max(float(np.max(outline.host.at(micro_batch_size))), 0.0)


def varied(outline: Outline, base: Outline, other: Outline) -> Outline:
    """`outline` with the state of `other` in the place of that of `base`.

    `base` and `other` are of one checkpointing policy and differ in optimizer, average or masters; of `other` one
    micro-batch size is enough. Activations and gradients stay those of `outline`; what differs is the state that is
    live all along, and the phases without activations, which are those of `other`.
    """
    ours = numbered(base.phases)
    lines, parts = [], []
    for at, key in enumerate(numbered(other.phases)):
        if key in ours and key[0] in OF_ACTIVATIONS:
            number = ours[key]
            # The first moment of a span is what the one before it left; column 0 is the span's peak.
            shift = other.live[at].start[1] - base.live[number].start[1]
            lines.append(outline.live[number] + Line(np.asarray(shift), np.asarray(0.0)))
            shifts = other.parts[at].start[:, 1:2] - base.parts[number].start[:, 1:2]
            parts.append(outline.parts[number] + Line(shifts, np.zeros_like(shifts)))
        else:
            lines.append(other.live[at])
            parts.append(other.parts[at])
    start, slope = outline.work
    return replace(
        outline,
        phases=other.phases,
        live=tuple(lines),
        parts=tuple(parts),
        work=(replace(start, step=other.work[0].step), replace(slope, step=slope.step * 0.0)),
        host=outline.host + level(other.host.start - base.host.start),
    )


def numbered(phases: tuple[str, ...]) -> dict[tuple[str, int], int]:
    """Each span by its phase and how often that came before."""
    return {(phase, phases[:at].count(phase)): at for at, phase in enumerate(phases)}
