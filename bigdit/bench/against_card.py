"""A rehearsed timeline against what a CUDA device's own allocator recorded: by phase, and by operator."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from bigdit.bench.alignment import unmatched
from bigdit.memory import CUDA_GRANULARITY, Block, Span, Timeline, rounded
from bigdit.memory.allocator import Playback
from bigdit.spec import Strict


class PhaseAgainst(Strict):
    """One occurrence of a phase, rehearsed and on the card: `allocated` in blocks of 512 B, `reserved` by replay."""

    phase: str
    rehearsed_allocated_bytes: NonNegativeInt
    card_allocated_bytes: NonNegativeInt
    rehearsed_reserved_bytes: NonNegativeInt
    card_reserved_bytes: NonNegativeInt

    @property
    def allocated_difference(self) -> int:
        return self.rehearsed_allocated_bytes - self.card_allocated_bytes

    @property
    def reserved_difference(self) -> int:
        return self.rehearsed_reserved_bytes - self.card_reserved_bytes


class Difference(Strict):
    """Blocks of `nbytes` (in 512 B) that only one side has: `count` of them, by `operator` or the rehearsal's label.

    `at_peak`: live at that side's peak of the phase; else allocated during it.
    """

    span: NonNegativeInt
    phase: str
    side: Literal["card", "rehearsed"]
    operator: str
    nbytes: PositiveInt
    count: PositiveInt
    at_peak: bool


class Against(Strict):
    """All phases, and all differences. `allocator_exact`: our replay of the card's events has the card's own peaks."""

    phases: tuple[PhaseAgainst, ...]
    differences: tuple[Difference, ...]
    allocator_exact: bool


class Reserved(Strict):
    """Peaks of one phase by torch's counters, or by our allocator: whole blocks, and what was reserved."""

    allocated_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt


def against(
    rehearsed: Timeline,
    card: Timeline,
    counters: Sequence[Reserved],
    capacity_bytes: int,
    *,
    expandable_segments: bool = False,
) -> Against:
    """`counters`: the card's own, phase by phase. Raises ValueError where the phases are not the same."""
    names = [[span.phase for span in timeline.spans] for timeline in (rehearsed, card)]
    if names[0] != names[1]:
        raise ValueError(f"the rehearsal has the phases {names[0]}, and the card {names[1]}")
    ours, theirs = (
        by_replay(timeline, capacity_bytes, expandable_segments=expandable_segments) for timeline in (rehearsed, card)
    )
    live_ours, live_theirs = _at_peaks(rehearsed), _at_peaks(card)
    phases = tuple(
        PhaseAgainst(
            phase=span.phase,
            rehearsed_allocated_bytes=_sum(live_ours[at]),
            card_allocated_bytes=_sum(live_theirs[at]),
            rehearsed_reserved_bytes=ours[at].reserved_bytes,
            card_reserved_bytes=counters[at].reserved_bytes,
        )
        for at, span in enumerate(card.spans)
    )
    differences: list[Difference] = []
    for at, (left, right) in enumerate(zip(rehearsed.spans, card.spans, strict=True)):
        differences += _differences(at, right.phase, *_allocated(rehearsed, left, card, right), at_peak=False)
        if phases[at].allocated_difference:
            differences += _differences(at, right.phase, *_only(live_ours[at], live_theirs[at]), at_peak=True)
    return Against(phases=phases, differences=tuple(differences), allocator_exact=list(counters) == theirs)


def by_replay(timeline: Timeline, capacity_bytes: int, *, expandable_segments: bool = False) -> list[Reserved]:
    """What bigdit's caching allocator makes of each span of `timeline`. Raises OutOfMemory."""
    playback = Playback(timeline, capacity_bytes, expandable_segments=expandable_segments)
    found = []
    for span in timeline.spans:
        playback.device.reset_peak()
        top = playback.allocator.allocated_bytes
        for at in range(span.start, span.stop):
            playback.step(at)
            top = max(top, playback.allocator.allocated_bytes)
        found.append(Reserved(allocated_bytes=top, reserved_bytes=playback.device.peak_reserved_bytes))
    return found


def _at_peaks(timeline: Timeline) -> list[list[Block]]:
    """The blocks that were live at each span's peak, in blocks of 512 B; at its start, if it never held more."""
    now, live, found = 0, dict[int, Block](), []
    for span in timeline.spans:
        changes = [change for _, change in timeline.changes(span, CUDA_GRANULARITY)]
        heights = list(itertools.accumulate(changes, initial=now))
        moment = heights.index(max(heights))
        for at, event in enumerate(timeline.events[span.start : span.stop]):
            if at == moment:
                found.append(list(live.values()))
            if event > 0:
                live[event] = timeline.blocks[event - 1]
            else:
                live.pop(-event, None)
        if moment == len(changes):
            found.append(list(live.values()))
        now = heights[-1]
    return found


def _allocated(ours: Timeline, left: Span, theirs: Timeline, right: Span) -> tuple[list[Block], list[Block]]:
    """Blocks allocated in these spans that the other side does not allocate there, in the order of either."""
    mine, cards = (
        [block for block, change in timeline.changes(span) if change > 0]
        for timeline, span in ((ours, left), (theirs, right))
    )
    lone = unmatched([_size(block) for block in mine], [_size(block) for block in cards])
    return [mine[i] for i in lone[0]], [cards[i] for i in lone[1]]


def _only(ours: list[Block], theirs: list[Block]) -> tuple[list[Block], list[Block]]:
    """Blocks of sizes that the other side has fewer of."""
    mine, cards = Counter(map(_size, ours)), Counter(map(_size, theirs))
    return _beyond(ours, mine - cards), _beyond(theirs, cards - mine)


def _beyond(blocks: list[Block], excess: Counter[int]) -> list[Block]:
    """The latest blocks of each size in excess."""
    found = []
    for block in reversed(blocks):
        if excess[_size(block)] > 0:
            excess[_size(block)] -= 1
            found.append(block)
    return found


def _differences(
    at: int, phase: str, ours: Iterable[Block], theirs: Iterable[Block], *, at_peak: bool
) -> list[Difference]:
    counts: dict[tuple[Literal["card", "rehearsed"], str, int], int] = defaultdict(int)
    for block in ours:
        counts["rehearsed", f"{block.category}: {block.label}", _size(block)] += 1
    for block in theirs:
        counts["card", block.label, _size(block)] += 1
    return [
        Difference(span=at, phase=phase, side=side, operator=name, nbytes=size, count=count, at_peak=at_peak)
        for (side, name, size), count in counts.items()
        if size
    ]


def _size(block: Block) -> int:
    return rounded(block.nbytes, CUDA_GRANULARITY)


def _sum(blocks: Iterable[Block]) -> int:
    return sum(map(_size, blocks))
