"""Emulated cards that plans are tried on: one process for all, exact limits, and one verdict however it is asked."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import UNLIMITED
from bigdit.rehearse import StepRequest
from bigdit.rehearse.pool import Pool
from bigdit.search.predict.anchors import Sample
from cards import A40, SANA, SMALL, request

from bigdit.config.strategy import parse_strategy
from bigdit.emulator.interpreter import cuda_python
from bigdit.errors import UserError
from bigdit.profile.attempt import Attempt
from bigdit.profile.cards import Asked, Cards, Row
from bigdit.report import words
from bigdit.search.answer import make_plan
from bigdit.search.asking.ask import question_for
from bigdit.search.finding.best import search
from bigdit.search.finding.candidates import beside, candidate
from bigdit.search.finding.confirm import confirmed_best
from bigdit.search.finding.evidence import weighed
from bigdit.search.finding.explore import explore, hopeful
from bigdit.search.finding.space import Proposal, proposals
from bigdit.search.finding.verdict import safe_bytes
from bigdit.search.question import LARGEST_MICRO_BATCH, Pins, Question
from bigdit.units import GIB, MIB, gib

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.slow
def test_the_largest_is_found_from_any_guess() -> None:
    with Cards(A40) as cards:
        guesses = [(0, GIB), (1, 1), (40.5, MIB), (LARGEST_MICRO_BATCH, math.inf)]
        rows = [Row(partial(request, "single"), guess, sample_bytes) for guess, sample_bytes in guesses]
        found = [int(each or 0) for each in cards.largest(rows, 12 * GIB)]
        assert found == found[:1] * 4
        asked = [(request("single", found[0] + more), 12 * GIB) for more in (0, 1)]
        runs, ended = cards.run(asked), cards.run(asked, to_end=False)
        assert cards.largest(rows[:2], GIB) == [0] * 2
    assert [run is not None and run.fits for run in runs] == [True, False]
    assert [run is not None and run.ran for run in ended] == [True, False]


@pytest.mark.slow
def test_a_plan_ran_and_so_did_its_alternatives_and_its_limit_and_one_more_did_not() -> None:
    card = A40.model_copy(update={"usable_mib": 12 * GIB // MIB})
    only = Pins(engine="single", optimizer="adamw", checkpointed_blocks=0)
    asked = Question(model=SMALL, gpu=card, resolution=(1024, 1024), pins=only, device="emulated")
    plan = make_plan(asked)
    (limit,) = plan.buckets
    assert (plan.verdict, plan.chosen.ran, limit.ran, plan.emulated is not None) == ("FITS", True, True, True)
    assert plan.emulated.startswith(f"{plan.versions['torch']} CUDA ")  # what ran, not the build that asked
    assert 1 <= plan.chosen.strategy.micro_batch_size <= limit.none
    assert all(choice.step.launches is not None and choice.step.launches.counted for choice in plan.front)
    assert all(choice.ran for choice in plan.front)
    assert not any(choice.verdict == "DOES NOT FIT" for choice in plan.front)
    room = safe_bytes(card, beside(asked, plan.chosen.strategy), plan.band)
    sample = Sample(SMALL, card, asked.resolution)
    requests = [sample.request(plan.chosen.strategy.with_micro_batch_size(limit.none + more)) for more in (0, 1)]
    with Cards(card) as cards:
        runs = cards.run([(request, room) for request in requests])
    assert [run is not None and run.fits for run in runs] == [True, False]
    pinned = [
        asked.model_copy(update={"pins": only.model_copy(update={"micro_batch_size": limit.none + more})})
        for more in (0, 1)
    ]
    fits, more = map(make_plan, pinned)
    assert (fits.verdict, fits.buckets) == ("FITS", plan.buckets)
    assert more.verdict != "FITS"
    assert more.buckets == plan.buckets  # of what does not fit they ran as well
    assert more.chosen.process.high_bytes > card.usable_bytes
    at_limit = next(choice for choice in plan.front if choice.strategy.micro_batch_size == limit.none)
    assert at_limit.step.launches.count == sum(each.launches for each in runs[0].launched.values())
    kept, recomputed = plan.curves
    assert [each.micro_batch_sizes[each.ran - 1] for each in (kept, recomputed)] == [limit.none, limit.full]
    assert all(list(each.process_bytes) == sorted(each.process_bytes) for each in plan.curves)
    assert kept.process_bytes[kept.ran - 1] <= card.usable_bytes < kept.process_bytes[-1]
    own = next(setting for setting in plan.settings if setting.holds(plan.chosen.strategy))
    ran = {each.micro_batch_size: each for each in own.points if each.found == "run"}
    for size, nbytes in zip(kept.micro_batch_sizes[: kept.ran], kept.process_bytes, strict=False):
        assert (ran[size].process.high_bytes, ran[size].verdict) == (nbytes, "FITS")
    assert [size for size, each in ran.items() if each.at_peak_rehearsed] == [plan.chosen.strategy.micro_batch_size]


@pytest.mark.slow
def test_of_pictures_turned_by_a_quarter_as_many_fit_and_one_more_does_not() -> None:
    """Which the plan has from as many that ran alike, and not from one more that did not."""
    card = A40.model_copy(update={"usable_mib": 12 * GIB // MIB})
    only = Pins(engine="single", optimizer="adamw", checkpointed_blocks=0)
    asked = Question(model=SMALL, gpu=card, resolution=(512, 1024), pins=only, device="emulated")
    asked = asked.model_copy(update={"buckets": ((1024, 512),)})
    plan = make_plan(asked)
    one, turned = plan.buckets
    assert (one.none, one.full) == (turned.none, turned.full)
    sample = Sample(SMALL, card, (1024, 512))
    room = safe_bytes(card, beside(asked, plan.chosen.strategy), plan.band)
    with Cards(card) as cards:
        largest, more = (
            cards.run([(sample.request(plan.chosen.strategy.with_micro_batch_size(size)), room)], to_end=False)[0]
            for size in (turned.none, turned.none + 1)
        )
    assert largest is not None
    assert more is not None
    assert (largest.fits, more.fits) == (True, False)


@pytest.mark.slow
def test_the_way_from_the_copied_setting_runs_where_the_card_is_too_small_for_it() -> None:
    """As rehearsals of siblings predict it."""
    card = A40.model_copy(update={"usable_mib": 8 * GIB // MIB})
    only = Pins(engine="single", optimizer="adamw", checkpointed_blocks=0, micro_batch_size=2)
    asked = Question(model=SMALL, gpu=card, resolution=(1024, 1024), pins=only, explain=True, device="emulated")
    ran, predicted = (make_plan(asked.model_copy(update={"device": each})) for each in ("emulated", "rehearsed"))
    assert not any(step.predicted for step in ran.waterfall)
    assert [step.predicted for step in predicted.waterfall] == [True] * (len(ran.waterfall) - 1) + [False]
    assert [step.change for step in ran.waterfall] == [step.change for step in predicted.waterfall]
    assert ran.waterfall[0].process_bytes > card.usable_bytes
    expected = [step.process_bytes for step in predicted.waterfall]
    assert [step.process_bytes for step in ran.waterfall] == pytest.approx(expected, rel=0.01)
    assert [step.verdict for step in ran.waterfall] == [step.verdict for step in predicted.waterfall]


@pytest.mark.slow
def test_curves_run_beyond_a_global_batch_and_settings_do_not() -> None:
    only = Pins(engine="single", optimizer="adamw", checkpointed_blocks=0)
    plan = make_plan(
        Question(model=SMALL, gpu=A40, resolution=(1024, 1024), pins=only, global_batch_size=4, device="emulated")
    )
    assert plan.verdict == "FITS"
    assert max(plan.curves[0].micro_batch_sizes[: plan.curves[0].ran]) > 4
    assert {point.micro_batch_size for setting in plan.settings for point in setting.points} == {1, 2, 4}


@pytest.mark.slow
def test_a_plan_whose_attempts_could_not_be_run_says_so_and_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only = Pins(engine="single", optimizer="adamw", checkpointed_blocks=0, micro_batch_size=2)
    asked = Question(model=SMALL, gpu=A40, resolution=(1024, 1024), pins=only, device="emulated")
    ends = tmp_path / "python"
    ends.write_text(f'#!/bin/sh\ncase "$*" in *card.attempts*) exit 7;; esac\nexec {cuda_python()} "$@"\n')
    ends.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("BIGDIT_CUDA_PYTHON", str(ends))
        plan = make_plan(asked)
    assert (plan.verdict, plan.chosen.ran, plan.emulated) == ("FITS", False, None)
    assert not plan.chosen.step.launches.counted
    assert "not run on an emulated card: short-sana on an emulated card ended with status 7 and no result" in (
        plan.notices
    )
    again = make_plan(asked)
    assert (again.chosen.ran, again.emulated is None) == (True, False)
    assert not any("not run" in notice for notice in again.notices)
    assert make_plan(asked) == again  # which was kept
    without = make_plan(asked.model_copy(update={"device": "rehearsed", "no_cards": "no C compiler was found"}))
    assert "not run on emulated cards: no C compiler was found" in without.notices


def test_where_plans_are_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On emulated cards where there are any, if nobody says otherwise."""
    monkeypatch.delenv("BIGDIT_DEVICE")
    found = question_for("sana-1600m", "a40")
    assert (found.device, found.no_cards) == ("emulated", None)
    found = question_for("sana-1600m", "a40", device="rehearsed")
    assert (found.device, found.no_cards) == ("rehearsed", None)
    monkeypatch.setenv("BIGDIT_DEVICE", "rehearsed")
    assert question_for("sana-1600m", "a40").device == "rehearsed"
    assert question_for("sana-1600m", "a40", device="emulated").device == "emulated"
    with pytest.raises(UserError, match=r"^--device is 'cpu'; it may be emulated or rehearsed$"):
        question_for("sana-1600m", "a40", device="cpu")
    monkeypatch.setenv("BIGDIT_DEVICE", "gpu")
    with pytest.raises(UserError, match=r"BIGDIT_DEVICE is 'gpu'; it may be emulated or rehearsed"):
        question_for("sana-1600m", "a40")


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("BIGDIT_CUDA_PYTHON", "is no interpreter with the CUDA build of torch; `make cuda` sets one up"),
        ("CC", "compiler"),
    ],
)
def test_without_what_cards_need_plans_are_rehearsed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, said: str
) -> None:
    monkeypatch.delenv("BIGDIT_DEVICE")
    monkeypatch.setenv(variable, str(tmp_path / "none"))
    asked = question_for("sana-1600m", "a40")
    assert asked.device == "rehearsed"
    assert asked.no_cards is not None
    assert said in asked.no_cards
    with pytest.raises(UserError, match=said):
        question_for("sana-1600m", "a40", device="emulated")


DEPTH = 20
"""Blocks of a narrow SANA, which 12 GiB hold with 5 of them recomputed."""

ONE_PROCESS = Pins(engine="single", optimizer="adamw", micro_batch_size=64)


def deep() -> tuple[Sample, Question]:
    kwargs = SANA.spec.kwargs | {"num_layers": DEPTH, "num_attention_heads": 8, "num_cross_attention_heads": 8}
    kwargs |= {"attention_head_dim": 16, "cross_attention_head_dim": 16, "cross_attention_dim": 128}
    spec = SANA.spec.model_copy(update={"name": "deep-sana", "kwargs": kwargs})
    model = SANA.model_copy(update={"spec": spec, "params": None, "block_lists": (("transformer_blocks", DEPTH),)})
    card = A40.model_copy(update={"usable_mib": 12 * GIB // MIB})
    asked = Question(model=model, gpu=card, resolution=(1024, 1024), pins=ONE_PROCESS, device="emulated")
    return Sample(model, card, asked.resolution), asked


class Short:
    """In the place of cards: steps want two fifths more than they are rehearsed to, and a tenth of it is only kept."""

    count = 2

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.made = 0

    def run(self, asked: Sequence[Asked], *, to_end: bool = True) -> list[Attempt | None]:
        self.made += len(asked)
        return [self._attempt(request, capacity_bytes) for request, capacity_bytes in asked]

    def _attempt(self, request: StepRequest, capacity_bytes: int) -> Attempt:
        (answer,) = self.pool.rehearse([request])
        assert not isinstance(answer, UserError)
        wanted = replay(answer.timeline, UNLIMITED, expandable_segments=True).peak_reserved_bytes * 7 // 5
        return Attempt(
            out_of_memory=None if wanted * 9 // 10 <= capacity_bytes else "no room",
            retries=0 if wanted <= capacity_bytes else 7,
            peak_allocated_bytes=min(wanted * 9 // 10, capacity_bytes),
            peak_reserved_bytes=min(wanted, capacity_bytes),
            launched={},
            seconds=0.1,
        )


def test_a_candidate_that_is_short_of_room_says_by_how_much() -> None:
    """So that in few attempts it is one with the fewest recomputed blocks that fit, or one more."""
    sample, asked = deep()
    with Pool() as pool:
        evidence, _ = weighed(pool, asked, ())
        cards = Short(pool)
        (best,) = search(pool, sample, asked, evidence, cards, lambda best: None).best
        made, blocks = cards.made, best.candidate.blocks
        fewer = best.candidate.strategy.settled(micro_batch_size=64, grad_accum_steps=1, checkpointed_blocks=blocks - 2)
        (less,) = cards.run([(sample.request(fewer), safe_bytes(asked.gpu, beside(asked, fewer), evidence.band))])
    assert best.verdict == "FITS"
    assert less is not None
    assert not less.fits
    assert made <= 3 * 4  # of two pairs, where each is short


def test_what_does_not_fit_has_no_say_in_what_is_preferred() -> None:
    """Of what fits, the one with more room is as fast as the other, and not as fast as what does not fit."""
    sample, asked = deep()
    with Pool() as pool:
        evidence, _ = weighed(pool, asked, ())
        (option,), _ = explore(pool, sample, [Proposal("one process", parse_strategy(["single"]))])
        every = [candidate(asked, option, 64, blocks, evidence) for blocks in range(DEPTH + 1)]
        short = every[2]
        near = max(blocks for blocks, each in enumerate(every) if each.as_fast_as(short))
        found = confirmed_best(pool, sample, asked, evidence, lambda: [short, every[near], every[near + 1]])
    assert every[near + 1].as_fast_as(every[near])
    assert [(each.verdict == "FITS", each.candidate.blocks) for each in found] == [
        (True, near + 1),
        (True, near),
        (False, 2),
    ]


def test_no_micro_batch_is_looked_for_where_the_host_is_short() -> None:
    only = Pins(engine="single", optimizer="adamw", checkpointed_blocks=0)
    plan = make_plan(Question(model=SMALL, gpu=A40, resolution=(1024, 1024), pins=only, host_memory_bytes=MIB))
    assert (plan.verdict, plan.short_of_host, plan.buckets) == ("DOES NOT FIT", True, ())
    assert not any(curve.ran for curve in plan.curves)


@pytest.mark.parametrize("engine", ["single", "fsdp2-offload"])
def test_a_machine_that_is_only_assumed_is_a_line_and_no_verdict(engine: Literal["single", "fsdp2-offload"]) -> None:
    """Nor a reason not to look at an engine, where nothing takes less."""
    only = Pins(engine=engine, optimizer="adamw", checkpointed_blocks=0, full=True)
    asked = Question(model=SMALL, gpu=A40, resolution=(1024, 1024), pins=only, host_memory_bytes=GIB, host_assumed=True)
    plan = make_plan(asked)
    assert (plan.verdict, plan.question, plan.chosen.verdict) == ("FITS", asked, "FITS")
    assert plan.buckets[0].none >= plan.chosen.strategy.micro_batch_size
    assert {point.verdict for point in plan.settings[0].points} >= {"FITS"}
    (line,) = words.host(plan)
    assert line.startswith(f"host RAM: {gib(plan.host.node_bytes)} needed a machine, more than the 1.00 GiB that are")


def test_an_engine_whose_state_its_machine_does_not_hold_is_not_looked_at() -> None:
    """It takes the bytes that it is said to, of which batches are no part; and comes nearest where nothing fits."""
    only = Pins(engine="fsdp2-offload", optimizer="adamw", checkpointed_blocks=0)
    asked = Question(model=SMALL, gpu=A40, resolution=(1024, 1024), pins=only, host_memory_bytes=5 * GIB)
    sample = Sample(asked.model, asked.gpu, asked.resolution)
    engines, _ = proposals(asked)
    with Pool() as pool:
        short = hopeful(pool, sample, asked, engines)
        said = re.match(r"its state alone takes ([\d.]+) GiB of a machine's memory", short.rejected[0].reason)
        assert said
        enough = asked.model_copy(update={"host_memory_bytes": round((float(said[1]) + 0.01) * GIB)})
        held = hopeful(pool, sample, enough, engines)
    assert len(engines) == 1
    assert (short.engines, short.short_of_host) == ([], engines)
    assert (held.engines, held.short_of_host, held.rejected) == (engines, [], [])
    needed = make_plan(asked).host.node_bytes
    assert float(said[1]) * GIB < needed < (float(said[1]) + 0.1) * GIB


def test_of_an_engine_that_goes_on_with_another_optimizer_the_one_its_machine_does_not_hold_is_named() -> None:
    """Why a plan is lossy, whose card has room for AdamW."""
    asked = Question(model=SMALL, gpu=A40, resolution=(1024, 1024), pins=Pins(engine="single"))
    sample = Sample(asked.model, asked.gpu, asked.resolution)
    engines = [each for each in proposals(asked)[0] if not each.last_resort]
    with Pool() as pool:
        none = hopeful(pool, sample, asked.model_copy(update={"host_memory_bytes": MIB}), engines[:1])
        said = re.match(r"its state alone takes ([\d.]+) GiB of a machine's memory", none.rejected[0].reason)
        assert said
        short = asked.model_copy(update={"host_memory_bytes": round((float(said[1]) - 0.01) * GIB)})
        held = hopeful(pool, sample, short, engines)
    assert held.engines == engines[:1]
    assert [each.choice for each in held.rejected] == ["one process, AdamW"]
    assert held.rejected[0].reason.startswith(said[0])
