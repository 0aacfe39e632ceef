"""Timelines and ledgers: arithmetic that holds for every sequence of allocations and frees."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigdit.memory import CATEGORIES, Block, Span, Timeline, ledger, rounded

PHASES = ("init", "forward", "backward", "step")


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Blocks of some bytes, allocated in order and freed in any order, cut into phases that may repeat."""
    blocks = draw(
        st.lists(
            st.builds(Block, st.integers(0, 5000), st.sampled_from(CATEGORIES), st.sampled_from(("a", "b.0"))),
            max_size=20,
        )
    )
    events: list[int] = []
    live: list[int] = []
    for number in range(1, len(blocks) + 1):
        for block in draw(st.lists(st.sampled_from(live), unique=True)) if live else []:
            live.remove(block)
            events.append(-block)
        live.append(number)
        events.append(number)
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=6)))
    edges = [0, *cuts, len(events)]
    spans = [Span(draw(st.sampled_from(PHASES)), start, stop) for start, stop in itertools.pairwise(edges)]
    return Timeline(tuple(blocks), tuple(events), tuple(spans))


@given(timelines(), st.sampled_from((1, 512)))
def test_parts_sum_to_the_peak_and_no_phase_ends_above_its_own(timeline: Timeline, granularity: int) -> None:
    found = ledger(timeline, granularity)
    for phase in found.phases:
        assert sum(phase.at_peak.values()) == phase.peak_bytes
        assert phase.end_bytes <= phase.peak_bytes <= found.peak_allocated_bytes
    assert sum(found.at_peak.values()) == found.peak_allocated_bytes
    assert found.deciding.peak_bytes == found.peak_allocated_bytes


@given(timelines())
def test_the_peak_is_the_highest_level_and_the_phases_carry_it_over(timeline: Timeline) -> None:
    level, highest = 0, 0
    for event in timeline.events:
        level += timeline.blocks[abs(event) - 1].nbytes * (1 if event > 0 else -1)
        highest = max(highest, level)
    assert ledger(timeline, 1).peak_allocated_bytes == highest


@given(timelines(), st.data())
def test_more_bytes_never_lower_the_peak(timeline: Timeline, data: st.DataObject) -> None:
    grown = tuple(
        Block(block.nbytes + data.draw(st.integers(0, 700)), block.category, block.label) for block in timeline.blocks
    )
    more = Timeline(grown, timeline.events, timeline.spans)
    for granularity in (1, 512):
        assert ledger(more, granularity).peak_allocated_bytes >= ledger(timeline, granularity).peak_allocated_bytes


@given(timelines())
def test_rounding_adds_less_than_one_granule_a_block(timeline: Timeline) -> None:
    exact, counted = ledger(timeline, 1).peak_allocated_bytes, ledger(timeline, 512).peak_allocated_bytes
    assert exact <= counted <= exact + 511 * len(timeline.blocks)
    assert counted % 512 == 0


@given(timelines())
def test_a_packed_timeline_comes_back_as_it_was(timeline: Timeline) -> None:
    assert Timeline.unpack(timeline.pack()) == timeline


@pytest.mark.parametrize("text", ["", 'not base 85 "', "c$", Timeline((), (), ()).pack()[:-3]])
def test_what_was_not_packed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a packed timeline"):
        Timeline.unpack(text)


def test_the_ledger_of_a_step_names_the_phase_that_decides_and_what_is_live_there() -> None:
    blocks = (
        Block(1000, "parameter", "proj"),
        Block(300, "saved activation", "proj"),
        Block(1000, "gradient", "aten.mm"),
        Block(50, "temporary", "aten.mul"),
    )
    events = (1, 2, 3, 4, -4, -2, -3)
    spans = (Span("init", 0, 1), Span("forward", 1, 2), Span("backward", 2, 6), Span("step", 6, 7))
    found = ledger(Timeline(blocks, events, spans), 1)
    assert found.deciding.phase == "backward"
    assert found.at_peak == {"parameter": 1000, "gradient": 1000, "saved activation": 300, "temporary": 50}
    (step,) = (phase for phase in found.phases if phase.phase == "step")
    assert (step.peak_bytes, step.end_bytes) == (2000, 1000)


@pytest.mark.parametrize(("nbytes", "counted"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_blocks_are_counted_in_whole_granules(nbytes: int, counted: int) -> None:
    assert rounded(nbytes, 512) == counted
