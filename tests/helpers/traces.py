"""Traces for the allocator: written out, and drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from bigdit.memory import Block, Span, Timeline
from bigdit.memory.caching import CachingAllocator, Device
from bigdit.memory.segments import ExpandableSegments, WholeSegments

KIB, MIB = 2**10, 2**20
ROOMY = 2**40
"""A card that has room for everything."""


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
