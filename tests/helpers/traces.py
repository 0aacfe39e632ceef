"""Write, draw and compare timelines."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import strategies as st

from bigdit.memory import Block, Span, Timeline

KIB, MIB = 2**10, 2**20
SHOWN = 8
"""How many events are shown from the first difference on, of either timeline."""


def timeline(*events: int, phases: tuple[tuple[str, int], ...] = (("step", 0),)) -> Timeline:
    """`30 * MIB` allocates that much, and `-2` frees the second allocation."""
    blocks: list[Block] = []
    coded: list[int] = []
    for event in events:
        if event < 0:
            coded.append(event)
            continue
        blocks.append(Block(event, "temporary", f"block {len(blocks) + 1}"))
        coded.append(len(blocks))
    stops = [start for _, start in phases[1:]] + [len(coded)]
    spans = tuple(Span(name, start, stop) for (name, start), stop in zip(phases, stops, strict=True))
    return Timeline(tuple(blocks), tuple(coded), spans)


SIZES = st.one_of(st.integers(0, 4 * KIB), st.integers(0, 2 * MIB), st.integers(MIB, 60 * MIB))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Random timelines: blocks of all sizes, freed in any order."""
    blocks = draw(st.lists(SIZES, max_size=40))
    events: list[int] = []
    live: list[int] = []
    for number, block in enumerate(blocks, start=1):
        for freed in draw(st.lists(st.sampled_from(live), unique=True, max_size=4)) if live else []:
            live.remove(freed)
            events.append(-freed)
        live.append(number)
        events.append(block)
    cut = draw(st.integers(0, len(events)))
    return timeline(*events, phases=(("init", 0), ("step", cut)))


def assert_same(found: Timeline, real: Timeline) -> None:
    """Check that blocks, events, spans, collectives and operators are equal, and in the same order."""
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
        printed = [
            ", ".join(f"{event} ({each.blocks[abs(event) - 1].label})" for event in part)
            for each, part in zip((found, real), parts, strict=True)
        ]
        return f"from event {at} of {len(real.events)}, in {phase}, on; found {printed[0]}; real {printed[1]}"
    return f"from number {at} on; found {parts[0]}; real {parts[1]}"
