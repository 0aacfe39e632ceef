"""Emulated cards that plans are tried on: one process for all, exact limits, and one verdict however it is asked."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
from cards import empty_cache

from bigdit import catalog
from bigdit.catalog import CatalogModel
from bigdit.config.strategy import parse_strategy
from bigdit.errors import UserError
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import UNLIMITED
from bigdit.rehearse import RehearsalRequest
from bigdit.rehearse.ask import request_for
from bigdit.rehearse.card.attempt import Attempt, Attempts
from bigdit.rehearse.card.client import Card, cuda_python
from bigdit.rehearse.pool import Pool
from bigdit.search.answer import make_plan
from bigdit.search.asking.ask import question_for
from bigdit.search.finding.best import search
from bigdit.search.finding.candidates import LARGEST_MICRO_BATCH, beside, candidate
from bigdit.search.finding.cards import Asked, Cards
from bigdit.search.finding.confirm import confirmed_best
from bigdit.search.finding.evidence import weighed
from bigdit.search.finding.explore import explore
from bigdit.search.finding.space import Proposal
from bigdit.search.finding.verdict import safe_bytes
from bigdit.search.predict.anchors import Sample
from bigdit.search.predict.sibling import depths, sibling
from bigdit.search.question import Pins, Question
from bigdit.spec import OptimizerName
from bigdit.units import GIB, MIB

A40 = catalog.gpu("a40")
SANA = catalog.model("sana-1600m")
SMALL = SANA.model_copy(
    update={
        "spec": SANA.spec.model_copy(update={"name": "short-sana", "kwargs": SANA.spec.kwargs | {"num_layers": 3}}),
        "params": None,
        "block_lists": (("transformer_blocks", 3),),
    }
)
STRATEGIES = (
    "single",
    "single,optimizer.name=adamw_8bit",
    "single,precision=bf16_sr,optimizer.name=came",
    "zero2,world_size=8",
    "zero3,world_size=8",
    "fsdp2,world_size=8",
    "zero2-offload,world_size=8",
    "zero3-offload-all,world_size=8",
    "fsdp2-offload,world_size=8",
    "single,ema.device=cpu",
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path_factory.mktemp("cache"))))
        yield


def request(strategy: str, micro_batch_size: int = 2, model: CatalogModel = SMALL) -> RehearsalRequest:
    asked = parse_strategy(strategy.split(",")).with_micro_batch_size(micro_batch_size)
    return request_for(model, A40, asked, resolution=(1024, 1024))


@pytest.mark.slow
def test_every_attempt_finds_the_card_as_the_first_one_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one process after others, and in one of its own with all events recorded, which steps on the host too where
    the optimizer is there: the same bytes."""

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # what a user says of this machine is not said of the card

    def peaks(folder: str, order: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        monkeypatch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path / folder)))
        with Attempts(A40) as card:
            runs = {strategy: card.run(request(strategy), 40 * GIB) for strategy in order}
        return {strategy: (run.peak_allocated_bytes, run.peak_reserved_bytes) for strategy, run in runs.items()}

    found = peaks("one", STRATEGIES)
    assert peaks("other", STRATEGIES[::-1]) == found
    with Card(A40, expandable_segments=True) as card:
        for strategy in STRATEGIES:
            phases = card.run(request(strategy)).phases
            assert found[strategy] == (
                max(phase.peak_allocated_bytes for phase in phases),
                max(phase.peak_reserved_bytes for phase in phases),
            )


@pytest.mark.slow
def test_the_card_looks_for_room_where_the_replayed_allocator_does() -> None:
    """In what it would reserve without a limit, and in less, down to where it runs out."""
    asked = request("fsdp2,world_size=8")
    with Pool(1) as pool, Attempts(A40) as card:
        (answer,) = pool.rehearse([asked])
        assert not isinstance(answer, UserError)
        most = card.run(asked, 40 * GIB).peak_reserved_bytes
        rooms = [most - less * MIB for less in (0, 2, 500, 1000)]
        runs = [card.run(asked, room) for room in rooms]
    replays = [replay(answer.timeline, room, expandable_segments=True, card_bytes=A40.usable_bytes) for room in rooms]
    assert [(each.retries, each.peak_reserved_bytes, each.ran) for each in runs] == [
        (each.cache_flushes, each.peak_reserved_bytes, each.fits) for each in replays
    ]
    assert (runs[0].fits, runs[1].ran, runs[1].fits, runs[-1].ran) == (True, True, False, False)


@pytest.mark.slow
def test_an_attempt_tells_what_the_second_step_had_the_card_do() -> None:
    """By phase, where it came to its end."""
    zero2, sharded = request("zero2-offload,world_size=8"), request("fsdp2,world_size=8")
    with Attempts(A40) as card:
        single, larger = (card.run(request("single", size), 40 * GIB).launched for size in (2, 4))
        offload, fsdp2 = (card.run(each, 40 * GIB).launched for each in (zero2, sharded))
        full = card.run(request("single"), GIB)
    assert list(single) == ["forward", "backward", "step"]
    more = {phase: larger[phase].kernels - each.kernels for phase, each in single.items()}
    assert more == {"forward": 2, "backward": 0, "step": 0}  # noise is drawn sample by sample
    assert not any(each.collectives for each in single.values())
    assert single["backward"].library_calls > 1.5 * single["forward"].library_calls > 0
    assert single["step"].library_calls == 0
    # The host waits for the card once a step: whether it is taken.
    assert {phase: each.host_syncs for phase, each in single.items()} == {"forward": 0, "backward": 0, "step": 1}
    # Three blocks, and the rest as one, which is not gathered again.
    assert fsdp2["forward"].collectives == {"all_gather": 4}
    assert fsdp2["backward"].collectives == {"all_gather": 3, "reduce_scatter": 4}
    # The process's share of the gradients goes to the host in fp32, and of the weights comes back in bf16.
    gradients, weights = offload["backward"].copies["to host"], offload["step"].copies["to device"]
    assert gradients.nbytes == pytest.approx(2 * weights.nbytes, rel=1e-3)
    assert (full.ran, full.launched) == (False, {})


MODELS = ("sana-1600m", "lumina-image-2.0", "z-image")


def memory_of(cache: Path, sizes: tuple[int, ...]) -> dict[str, tuple[int, int, int]]:
    """What two blocks of each model take at the last of the sizes, which are asked one after another."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, Attempts(A40) as card:
        patch.setenv("BIGDIT_CACHE", str(empty_cache(cache)))
        for name in MODELS:
            whole = catalog.model(name)
            model = sibling(whole, dict.fromkeys(depths(whole), 2))
            runs = [card.run(request("single", size, model), 40 * GIB) for size in sizes]
            assert all(each.ran for each in runs)
            found[name] = runs[-1].memory
    return found


@pytest.fixture(scope="module")
def third_and_first(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[int, int, int]]]:
    """What the models take as the third of their kind, and as the first, in a process that has seen no other of it."""
    return [memory_of(tmp_path_factory.mktemp("asked"), sizes) for sizes in ((1, 2, 3), (3,))]


@pytest.mark.slow
@pytest.mark.xdist_group("cards-values")  # two processes answer for all of them
@pytest.mark.parametrize("name", MODELS)
def test_what_takes_other_memory_without_values_is_run_with_them(
    name: str, third_and_first: list[dict[str, tuple[int, int, int]]]
) -> None:
    """Lumina's captions are as long as their masks say; Z-Image does not run without."""
    third, first = third_and_first
    assert third[name] == first[name]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16_sr"])
def test_what_an_optimizer_takes_does_not_follow_from_values(precision: str) -> None:
    """The first attempt of a kind has values, and those of other optimizers have none."""
    model = sibling(SMALL, {"transformer_blocks": 1})

    def named(optimizer: str) -> CatalogModel:
        return model.model_copy(update={"spec": model.spec.model_copy(update={"name": f"sana-{optimizer}"})})

    with Attempts(A40) as card:
        assert card.run(request("single", 1, model), 40 * GIB).ran
        for optimizer in get_args(OptimizerName):
            strategy = f"single,precision={precision},optimizer.name={optimizer}"
            try:
                without = request(strategy, 2, model)
            except UserError:
                continue
            assert (
                card.run(without, 40 * GIB).memory == card.run(request(strategy, 2, named(optimizer)), 40 * GIB).memory
            )


@pytest.mark.slow
def test_a_process_that_dies_is_a_line_and_the_next_question_has_another() -> None:
    with Cards(A40) as cards, ThreadPoolExecutor(1) as aside:
        first = cards.run([(request("single", 2), 40 * GIB)])[0]
        dies = aside.submit(cards.run, [(request("single", 12), 40 * GIB)])
        while not dies.done():
            for fork in filter(None, cards.attempts.lanes.forks):
                with suppress(ProcessLookupError):
                    os.kill(fork, signal.SIGKILL)
        assert dies.result() == [None]
        (why,) = cards.unanswered
        assert why.startswith(f"short-sana on an emulated card ended with status {-signal.SIGKILL}")
        (after,) = cards.run([(request("single", 12), 40 * GIB)])
    assert isinstance(first, Attempt)
    assert isinstance(after, Attempt)
    assert after.peak_allocated_bytes > first.peak_allocated_bytes


@pytest.mark.slow
def test_attempts_of_any_number_of_processes_follow_each_other() -> None:
    """On one card; each process has one process group."""
    with Attempts(A40) as card:
        two, four, less = [
            card.run(request(f"fsdp2,world_size={cards}", size), 40 * GIB) for cards, size in ((2, 2), (4, 2), (2, 1))
        ]
    assert [each.fits for each in (two, four, less)] == [True] * 3
    assert two.peak_allocated_bytes > four.peak_allocated_bytes
    assert two.peak_allocated_bytes > less.peak_allocated_bytes


@pytest.mark.slow
def test_the_largest_is_found_from_any_guess() -> None:
    with Cards(A40) as cards:
        rows = [(partial(request, "single"), guess) for guess in (0, 1, 40, LARGEST_MICRO_BATCH)]
        found = cards.largest(rows, 12 * GIB)
        assert found[0] is not None
        assert found == found[:1] * 4
        runs = cards.run([(request("single", size), 12 * GIB) for size in (found[0], found[0] + 1)])
        assert cards.largest(rows[:2], GIB) == [0] * 2
    assert [run is not None and run.fits for run in runs] == [True, False]


@pytest.mark.slow
def test_a_plan_ran_and_so_did_its_alternatives_and_its_limit_and_one_more_did_not() -> None:
    card = A40.model_copy(update={"usable_mib": 12 * GIB // MIB})
    only = Pins(engine="single", optimizer="adamw", checkpointed_blocks=0)
    asked = Question(model=SMALL, gpu=card, resolution=(1024, 1024), pins=only, device="emulated")
    plan = make_plan(asked)
    (limit,) = plan.buckets
    assert (plan.verdict, plan.chosen.ran, limit.ran, plan.emulated is not None) == ("FITS", True, True, True)
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
    assert "not run on an emulated card: short-sana on an emulated card ended with status 7 and no result:" in (
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

    def run(self, asked: Sequence[Asked]) -> list[Attempt | None]:
        self.made += len(asked)
        return [self._attempt(request, capacity_bytes) for request, capacity_bytes in asked]

    def _attempt(self, request: RehearsalRequest, capacity_bytes: int) -> Attempt:
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
