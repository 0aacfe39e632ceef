"""Traces for the allocator: written out, drawn at random, and held against each other."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import strategies as st

from bigdit.memory import Block, Span, Timeline
from bigdit.memory.caching import CachingAllocator, Device
from bigdit.memory.segments import ExpandableSegments, WholeSegments

KIB, MIB = 2**10, 2**20
ROOMY = 2**40
"""A card that has room for everything."""
SHOWN = 8
"""Events that are shown from the first that differs on, of either timeline."""


def allocator(capacity: int = ROOMY, expandable: bool = False) -> tuple[CachingAllocator, Device]:
    device = Device(capacity)
    return CachingAllocator((ExpandableSegments if expandable else WholeSegments)(device)), device


def timeline(*events: int | tuple[int, int], phases: tuple[tuple[str, int], ...] = (("step", 0),)) -> Timeline:
    """`30 * MIB` allocates that, `(30 * MIB, 7)` on stream 7, and `-2` frees what was allocated second."""
    blocks: list[Block] = []
    coded: list[int] = []
    for event in events:
        if isinstance(event, int) and event < 0:
            coded.append(event)
            continue
        nbytes, stream = event if isinstance(event, tuple) else (event, 0)
        blocks.append(Block(nbytes, "temporary", f"block {len(blocks) + 1}", stream))
        coded.append(len(blocks))
    stops = [start for _, start in phases[1:]] + [len(coded)]
    spans = tuple(Span(name, start, stop) for (name, start), stop in zip(phases, stops, strict=True))
    return Timeline(tuple(blocks), tuple(coded), spans)


SIZES = st.one_of(st.integers(0, 4 * KIB), st.integers(0, 2 * MIB), st.integers(MIB, 60 * MIB))


@st.composite
def timelines(draw: st.DrawFn, streams: int = 3) -> Timeline:
    """Blocks of all size classes on a few streams, freed in any order."""
    blocks = draw(st.lists(st.tuples(SIZES, st.integers(0, streams - 1)), max_size=40))
    events: list[int | tuple[int, int]] = []
    live: list[int] = []
    for number, block in enumerate(blocks, start=1):
        for freed in draw(st.lists(st.sampled_from(live), unique=True, max_size=4)) if live else []:
            live.remove(freed)
            events.append(-freed)
        live.append(number)
        events.append(block)
    cut = draw(st.integers(0, len(events)))
    return timeline(*events, phases=(("init", 0), ("step", cut)))


CAPACITIES = st.integers(0, 400).map(lambda mib: mib * MIB)


def assert_same(found: Timeline, real: Timeline) -> None:
    """Every block, event, span, collective and operator of both, in order."""
    for field in fields(Timeline):
        ours, theirs = getattr(found, field.name), getattr(real, field.name)
        if ours != theirs:
            raise AssertionError(f"{field.name} differ: {_difference(found, real, field.name)}")


def _difference(found: Timeline, real: Timeline, name: str) -> str:
    ours, theirs = getattr(found, name), getattr(real, name)
    at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"{len(ours)} found, {len(theirs)} real"
    parts = [each[at : at + SHOWN] for each in (ours, theirs)]
    if name == "events":
        phase = next((span.phase for span in real.spans if span.start <= at < span.stop), "?")
        said = [
            ", ".join(f"{event} ({each.blocks[abs(event) - 1].label})" for event in part)
            for each, part in zip((found, real), parts, strict=True)
        ]
        return f"from event {at} of {len(real.events)}, in {phase}, on; found {said[0]}; real {said[1]}"
    return f"from number {at} on; found {parts[0]}; real {parts[1]}"
