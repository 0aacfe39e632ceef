"""Predictions from shallow siblings against rehearsals of the whole model, and the search against brute force."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import UNLIMITED
from bigdit.rehearse import RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.unproved import UNPROVED
from bigdit.search.predict.anchors import OF_STATE, OF_STEP, SIZES, Depths, Sample, grid, outline, requests
from bigdit.search.predict.moments import around, counterparts, resized
from bigdit.search.predict.sibling import block_count, depths, sibling
from hypothesis import given
from hypothesis import strategies as st

from bigdit import catalog
from bigdit.catalog.models import models
from bigdit.config.strategy import parse_strategy
from bigdit.memory import CATEGORIES
from bigdit.search.answer import make_plan
from bigdit.search.asking.ask import question_for
from bigdit.search.finding.candidates import SAME_SPEED, Option, beside, most
from bigdit.search.finding.explore import explore
from bigdit.search.finding.space import Proposal, proposals
from bigdit.search.finding.verdict import planned, process, verdict
from bigdit.search.question import Pins, Question
from bigdit.spec import Strategy
from bigdit.speed.interval import Interval
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of
from bigdit.units import MIB

BLOCKS = 6
SANA = catalog.model("sana-1600m")
SMALL = SANA.model_copy(
    update={
        "spec": SANA.spec.model_copy(
            update={
                "name": "small-sana",
                "kwargs": SANA.spec.kwargs
                | {
                    "num_layers": BLOCKS,
                    "num_attention_heads": 16,
                    "num_cross_attention_heads": 8,
                    "cross_attention_head_dim": 64,
                    "cross_attention_dim": 512,
                },
            }
        ),
        "params": None,
        "block_lists": (("transformer_blocks", BLOCKS),),
    }
)
# So wide that its state outweighs what a communicator of one process takes of the card.
WIDE = SANA.model_copy(
    update={
        "spec": SANA.spec.model_copy(update={"name": "wide-sana", "kwargs": SANA.spec.kwargs | {"num_layers": 4}}),
        "params": None,
        "block_lists": (("transformer_blocks", 4),),
    }
)
A40 = catalog.gpu("a40")
SAMPLE = Sample(SMALL, A40, (1024, 1024))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGDIT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as found:
        yield found


def question(**changes: object) -> Question:
    return Question(model=SMALL, gpu=A40, resolution=(1024, 1024)).model_copy(update=changes)


@pytest.fixture(scope="module", params=["single", "zero2,world_size=8", "fsdp2,world_size=8"])
def option(request: pytest.FixtureRequest, pool: Pool) -> Option:
    strategy = parse_strategy([*request.param.split(",")])
    (found,), rejected = explore(pool, SAMPLE, [Proposal(request.param, strategy)])
    assert not rejected
    return found


ANCHORED = 4
"""The largest micro-batch size that siblings are rehearsed at."""
STATE = ("parameter", "buffer", "master weight", "optimizer state", "EMA", "input")


@pytest.mark.slow
def test_moments_of_siblings_continue_to_the_whole_model(option: Option, pool: Pool) -> None:
    """None, the first three and all blocks recomputed, at micro-batches inside and outside the rehearsed ones."""
    places = [(size, blocks) for size in (2, 3, 9) for blocks in (0, 3, BLOCKS)]
    strategies = [
        option.proposal.strategy.settled(micro_batch_size=size, grad_accum_steps=1, checkpointed_blocks=blocks)
        for size, blocks in places
    ]
    answers = pool.rehearse([SAMPLE.request(strategy) for strategy in strategies])
    for (size, blocks), answer in zip(places, answers, strict=True):
        assert isinstance(answer, RehearsedSize)
        expected = option.arrangement.peaks(size, blocks)
        for phase in ("forward", "backward"):
            found = answer.ledger.phase(phase)
            scratch = found.at_peak.get("workspace", 0)  # of kernels: it does not grow evenly, as tensors do
            error = abs(expected[phase] - found.peak_bytes)
            assert error <= scratch + 1e-4 * found.peak_bytes, (size, blocks, phase)
        deciding, parts = option.arrangement.at_peak(size, blocks)
        assert deciding == max(expected, key=lambda phase: expected[phase])
        assert sum(parts.values()) == pytest.approx(expected[deciding], abs=len(parts))
        known = answer.ledger.phase(deciding).at_peak
        # Far from the anchors, scratch decides which of two moments that are equally high is the higher one.
        for category in STATE if size > ANCHORED else CATEGORIES:
            error = abs(parts.get(category, 0) - known.get(category, 0))
            least = 0 if category in STATE else known.get("workspace", 0)
            assert error <= least + 1e-4 * answer.ledger.peak_allocated_bytes, (size, blocks, category)
        assert option.arrangement.none.params == answer.params


@pytest.mark.slow
def test_the_search_finds_what_brute_force_finds(pool: Pool) -> None:
    """The chosen micro-batch and larger ones, every number of blocks, whole or in part: all rehearsed, on a
    small card. None is faster by more than counts; and none that is shown and as fast takes less."""
    card = A40.model_copy(update={"usable_mib": 3200})
    asked = question(gpu=card, pins=Pins(optimizer="adamw", engine="single"))
    plan = make_plan(asked)
    assert (plan.verdict, plan.chosen.confirmed) == ("FITS", True)
    chosen = plan.chosen.strategy
    size = chosen.micro_batch_size
    found = brute_force(pool, asked, [size, size + 1, 2 * size])
    rate = found[size, int(chosen.checkpointed_blocks), chosen.checkpointing]
    assert as_fast(rate, max(found.values(), key=lambda each: each.middle))
    shown = [row for row in plan.front if row.lossless and row.verdict == "FITS"]
    rates = {row.title: row.samples_per_second_per_card for row in shown}
    fastest = max(rates.values(), key=lambda each: each.middle)
    alike = [row for row in shown if as_fast(rates[row.title], fastest)]
    assert min(alike, key=lambda row: row.process.high_bytes) == plan.chosen


@pytest.mark.slow
def test_numerics_are_changed_only_where_somebody_asks(pool: Pool) -> None:
    """On a card too small for AdamW's state, the state goes to the host; 8 bits, which would fit, are not taken."""
    sample = Sample(WIDE, A40, (1024, 1024))
    (least,) = pool.rehearse([sample.request(Strategy(micro_batch_size=1, checkpointed_blocks="all"))])
    assert isinstance(least, RehearsedSize)
    _, taken = verdict(least.timeline, A40, beside(question(model=WIDE, gpu=A40), Strategy()), UNPROVED)
    wanted = process(planned(taken).wanted_bytes, taken.beside, UNPROVED).high_bytes
    card = A40.model_copy(update={"usable_mib": int(0.87 * wanted) // MIB})
    plan = make_plan(question(model=WIDE, gpu=card))
    assert (plan.verdict, plan.chosen.lossless) == ("FITS", True)
    assert "on the host" in plan.chosen.title
    asked = make_plan(question(model=WIDE, gpu=card, pins=Pins(optimizer="adamw_8bit")))
    assert (asked.verdict, asked.chosen.strategy.engine, asked.chosen.lossless) == ("FITS", "single", False)


def as_fast(rate: Interval, fastest: Interval) -> bool:
    least = 1 - SAME_SPEED
    return rate.low >= least * fastest.low and rate.high >= least * fastest.high


def brute_force(pool: Pool, asked: Question, sizes: Iterable[int]) -> dict[tuple[int, int, str], Interval]:
    """Images a second of all that fits, by micro-batch, blocks and how they are recomputed."""
    (proposed, *_), _ = proposals(asked)
    strategies = [
        proposed.strategy.model_copy(update={"checkpointing": kind}).settled(
            micro_batch_size=size,
            grad_accum_steps=1,
            checkpointed_blocks=blocks,
        )
        for kind in ("full", "selective")
        for size in sizes
        for blocks in range(kind == "selective", BLOCKS + 1)
    ]
    sample = Sample(SMALL, asked.gpu, asked.resolution)
    answers = pool.rehearse([sample.request(strategy) for strategy in strategies])
    found = {}
    for strategy, answer in zip(strategies, answers, strict=True):
        assert isinstance(answer, RehearsedSize)
        said, _ = verdict(answer.timeline, asked.gpu, beside(asked, strategy), UNPROVED)
        if said == "FITS":
            step = step_time(work_of(answer.timeline, strategy), strategy, asked.gpu, asked.cluster)
            key = strategy.micro_batch_size, int(strategy.checkpointed_blocks), strategy.checkpointing
            found[key] = step.seconds.per(strategy.micro_batch_size)
    return found


blocks_of_marks = st.lists(st.integers(1, 50), min_size=3, max_size=12)


@given(blocks_of_marks, blocks_of_marks, blocks_of_marks, st.integers(2, 4), st.integers(0, 4))
def test_every_moment_of_fewer_blocks_is_found_among_more_blocks(
    head: list[int], block: list[int], tail: list[int], few: int, more: int
) -> None:
    """In the halves that begin and end alike, with the blocks between them repeated."""
    short, long = (np.array([*head, *block * count, *tail]) for count in (few, few + more))
    found = counterparts(short, long)
    assert (found >= 0).all()
    assert (short == long[found]).all()
    assert (np.diff(found) >= 1).all()
    assert found[0] == 0
    assert found[-1] == len(long) - 1


def test_the_middle_of_two_halves_is_found_between_more_blocks_of_each() -> None:
    """Down and up again: the innermost blocks are those of the longer one, wherever the ends lead."""
    head, down, turn, up, tail = [1, 2], [3, 4, 5], [6], [7, 8], [9, 2]
    short, long = (np.array([*head, *down * half, *turn, *up * half, *tail]) for half in (2, 3))
    found = around(short, long)
    middle = slice(len(head), len(short) - len(tail))
    assert (found[middle] == np.arange(len(short))[middle] + len(down)).all()
    assert (short[found >= 0] == long[found[found >= 0]]).all()
    assert around(long, long).tolist() == [*range(len(long))]


@given(blocks_of_marks, blocks_of_marks, blocks_of_marks, st.integers(2, 4), st.integers(1, 3), st.integers(0, 40))
def test_what_is_done_between_samples_is_found_in_a_step_of_more_samples(
    sample: list[int], block: list[int], tail: list[int], blocks: int, few: int, more: int
) -> None:
    """At the beginning and at the end samples go one by one; moments between are those of the same blocks."""
    aside = [60 + mark for mark in sample]  # what is done of a sample alone is done nowhere else
    short, long = (
        np.array([0, *aside * samples, *block * blocks, *tail, *aside * samples]) for samples in (few, few + more)
    )
    found = resized(short, long)
    between = slice(1 + few * len(aside), len(short) - few * len(aside))
    assert (found[between] == np.arange(len(short))[between] + more * len(aside)).all()
    assert (short[found >= 0] == long[found[found >= 0]]).all()


def test_kernels_that_work_in_several_launches_change_no_moment_around_them() -> None:
    """Tensors of more than 2^31 numbers are reduced in pieces, once in each block."""
    short, long = (np.array([0, *[1, 2, 3, *[7, -7] * pieces, 4] * 3, 5]) for pieces in (1, 2))
    found = resized(short, long)
    assert (found >= 0).all()
    assert [int(found[at]) for at, mark in enumerate(short) if mark not in (7, -7)] == [
        at for at, mark in enumerate(long) if mark not in (7, -7)
    ]


def test_moments_that_are_nowhere_else_are_left_out() -> None:
    short, long = np.array([1, 2, 3, 4, 9]), np.array([1, 2, 7, 7, 7, 9])
    assert counterparts(short, long).tolist() == [0, 1, -1, -1, 5]


@pytest.mark.parametrize("name", ["sana-1600m", "flux.1-dev", "lumina-image-2.0", "sd3.5-medium", "hidream-i1"])
def test_siblings_add_up_to_the_model(name: str) -> None:
    """What is affine in the depths: their weights sum to one, and their blocks to all that can be checkpointed."""
    model = catalog.model(name)
    found = grid(model)
    assert sum(found.weights) == pytest.approx(1)
    blocks = sum(weight * block_count(each) for weight, each in zip(found.weights, found.siblings, strict=True))
    assert blocks == pytest.approx(block_count(model))


@pytest.mark.parametrize("of", [OF_STATE, OF_STEP])
def test_siblings_of_a_model_with_skips_are_even_and_can_be_made(pool: Pool, of: Depths) -> None:
    """HunyuanDiT's second half takes what the first half left, a block each."""
    model = catalog.model("hunyuandit-v1.2")
    found = grid(model, of)
    assert sum(weight * block_count(each) for weight, each in zip(found.weights, found.siblings, strict=True)) == 40
    asked = requests(Sample(model, A40, (1024, 1024)), Strategy(), SIZES[:1], of)
    answers = pool.rehearse(asked)
    assert all(isinstance(each, RehearsedSize) for each in answers)
    params = [each.params for each in answers if isinstance(each, RehearsedSize)]
    assert np.dot(found.weights, params) == pytest.approx(model.params, rel=1e-9)


@pytest.mark.slow
def test_the_shallowest_sibling_of_every_class_takes_a_step(pool: Pool) -> None:
    known = {model.spec.class_name: model for model in reversed(models()) if model.obstacle is None}
    asked = []
    for model in known.values():
        own = question_for(model=model.name, gpu="a40", buckets="none")
        sample = Sample(own.model, own.gpu, own.resolution, own.frames)
        asked += requests(sample, Strategy(checkpointed_blocks="all"), SIZES[:1], OF_STATE)[:1]
    answers = dict(zip(known, pool.rehearse(asked), strict=True))
    assert {name: each for name, each in answers.items() if not isinstance(each, RehearsedSize)} == {}


@pytest.mark.parametrize("name", ["sd3.5-medium", "hidream-i1"])
def test_what_goes_with_single_blocks_goes_with_them(name: str) -> None:
    model = catalog.model(name)
    kwargs = sibling(model, dict.fromkeys(depths(model), 2)).spec.kwargs
    assert kwargs.get("dual_attention_layers", [0, 1]) == [0, 1]
    assert len(kwargs.get("llama_layers", [0] * 4)) == 4


def test_blocks_with_a_second_attention_among_others_are_no_list_of_their_own() -> None:
    """A user's model may have them anywhere; the catalogue's are the first."""
    model = catalog.model("sd3.5-medium")
    spec = model.spec.model_copy(update={"kwargs": model.spec.kwargs | {"dual_attention_layers": [1, 9]}})
    mixed = model.model_copy(update={"spec": spec})
    assert [*depths(model).values()] == [13, 11]
    assert depths(mixed) == {"transformer_blocks": 24}
    assert sibling(mixed, {"transformer_blocks": 3}).spec.kwargs["dual_attention_layers"] == [1]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("hunyuandit-v1.2", (12,)), ("sd3.5-medium", (5, 6)), ("lumina-image-2.0", (8,))],
)
def test_blocks_that_are_not_alike_continue_to_the_whole_model(pool: Pool, name: str, lengths: tuple[int, ...]) -> None:
    """Joined by skips, whose gradients grow towards the middle, of two kinds, or between what is done sample by sample;
    beyond the anchors' micro-batches."""
    whole = catalog.model(name)
    model = sibling(whole, dict(zip(depths(whole), lengths, strict=True)))
    sample, strategy = Sample(model, A40, (1024, 1024)), Strategy(checkpointed_blocks="all")
    asked = [*requests(sample, strategy), sample.request(strategy.with_micro_batch_size(9))]
    *anchors, answer = (each for each in pool.rehearse(asked) if isinstance(each, RehearsedSize))
    found, peak = outline(model, strategy, anchors).peaks(9), answer.ledger.phase("backward")
    assert found["backward"] == pytest.approx(peak.peak_bytes, rel=1e-4, abs=peak.at_peak.get("workspace", 0))
    assert found["init"] == pytest.approx(answer.ledger.phase("init").peak_bytes, rel=1e-4)


def test_small_pictures_are_predicted_where_they_fill_the_card(pool: Pool) -> None:
    """What kernels take between micro-batches of 2 and 4 grows no further at a hundred: it is rehearsed there. So are
    none and all blocks of a shallow DiT recomputed, and the allocator's pieces are not those of such kernels either."""
    model = sibling(catalog.model("dit-l-2"), {"transformer_blocks": 8})
    sample = Sample(model, catalog.gpu("rtx-3060-12g").model_copy(update={"usable_mib": 5000}), (256, 256))
    (found,), _ = explore(pool, sample, [Proposal("one process", Strategy())])
    for blocks in (0, 8):
        outline = (found.arrangement.none, found.arrangement.full)[blocks == 8]
        size = most(lambda size, blocks=blocks: found.reserved(size, blocks) <= 5000 * MIB)  # type: ignore[misc]
        assert SIZES[-1] < size <= 2 * outline.farthest
        strategy = Strategy(micro_batch_size=size, checkpointed_blocks=blocks)
        (answer,) = pool.rehearse([sample.request(strategy)])
        assert isinstance(answer, RehearsedSize)
        peak = max(phase.peak_bytes for phase in answer.ledger.phases)
        assert max(found.arrangement.peaks(size, blocks).values()) == pytest.approx(peak, rel=1e-3)
        reserved = replay(answer.timeline, UNLIMITED, expandable_segments=True).peak_reserved_bytes
        assert found.reserved(size, blocks) == pytest.approx(reserved, rel=0.04)
