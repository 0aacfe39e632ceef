"""Plans that leave blocks' weights on the host: how many, when, and what they say of it."""

from __future__ import annotations

import html
from collections.abc import Callable
from functools import partial
from typing import get_args

import plans
import pytest
from bigdit.rehearse import RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.predict.anchors import Sample, shallowest, weighted
from bigdit.search.predict.sibling import sibling
from bigdit.search.predict.swap import swapping, swapping_requests

from bigdit import catalog
from bigdit.catalog import CatalogModel
from bigdit.profile.cards import NO_CARDS, Cards
from bigdit.report.page import page
from bigdit.search.answer import make_plan
from bigdit.search.finding.best import search
from bigdit.search.finding.candidates import Candidate, beside
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.space import proposals
from bigdit.search.finding.verdict import verdict
from bigdit.search.needs.host import host_need
from bigdit.search.plan import Plan, Setting
from bigdit.search.question import Pins, Question
from bigdit.search.telling.record import record
from bigdit.spec import LoraBase, Strategy
from bigdit.speed.cluster import Cluster
from bigdit.speed.work import work_of
from bigdit.units import GIB

pytestmark = pytest.mark.xdist_group("swapped plans")

FLUX = catalog.model("flux.1-dev")
SHORT = sibling(FLUX, {"transformer_blocks": 4, "single_transformer_blocks": 4})
"""Of two kinds, of which those that come first are the larger."""
SANA = sibling(catalog.model("sana-1600m"), {"transformer_blocks": 5})
ADAPTERS = Pins(engine="single", lora_rank=16)
WHOLE = Pins(engine="single", full=True)


def question(model: CatalogModel, mib: int, pins: Pins, **changes: object) -> Question:
    gpu = catalog.gpu("rtx-4090").model_copy(update={"usable_mib": mib})
    return Question(model=model, gpu=gpu, resolution=(512, 512), pins=pins).model_copy(update=changes)


@pytest.fixture(scope="module", autouse=True)
def _cache(own_cache: None) -> None:
    """Rehearsals that tests share, and none from before."""


@pytest.fixture(scope="module")
def short() -> Plan:
    """Adapters of a short Flux, whose frozen weights are more than the card has."""
    return make_plan(question(SHORT, 3400, ADAPTERS))


@pytest.fixture(scope="module")
def rehearsed(short: Plan) -> Callable[[Strategy], RehearsedSize]:
    asked = short.question

    def answer(strategy: Strategy) -> RehearsedSize:
        with Pool() as pool:
            (found,) = pool.rehearse([Sample(asked.model, asked.gpu, asked.resolution).request(strategy)])
        assert isinstance(found, RehearsedSize)
        return found

    return answer


@pytest.mark.slow
def test_every_base_that_fits_has_a_row_that_says_what_is_lossy(short: Plan) -> None:
    """int8 takes more than nf4 and is no faster, and is nearer to bf16."""
    assert {row.strategy.lora.base for row in short.front if row.strategy.lora} == set(get_args(LoraBase))
    for row in short.front:
        assert row.lossless or row.reason.endswith(f"quantised base ({row.strategy.lora and row.strategy.lora.base})")


def that_swap(plan: Plan) -> list[Setting]:
    return [each for each in plan.settings if each.strategy.blocks_to_swap and each.strategy.ema is None]


@pytest.mark.slow
def test_where_nothing_else_fits_weights_wait_on_the_host(short: Plan) -> None:
    chosen = short.chosen
    number = chosen.strategy.blocks_to_swap
    said = f"{number} of 8 blocks' weights on the host"
    assert (short.verdict, chosen.confirmed, chosen.lossless, number >= 3) == ("FITS", True, True, True)
    assert Strategy.model_validate(chosen.strategy.model_dump()) == chosen.strategy
    assert said in chosen.title
    assert f"weights     {said}, two at a time on the card" in plans.shown(short)
    assert said in html.unescape(page(short))
    assert record(short).strategy == chosen.strategy
    assert "copies to and from the host" in chosen.step.parts
    assert short.host.page_locked_bytes > 0.9 * number * GIB / 8
    assert all(limit.none == 0 < limit.recommended <= limit.full for limit in short.buckets)
    assert all(each.checkpointed_blocks >= number for each in short.smaller)


@pytest.mark.slow
def test_the_fewest_that_fit_are_among_those_looked_at(
    short: Plan, rehearsed: Callable[[Strategy], RehearsedSize]
) -> None:
    fewest, *more = (each.strategy for each in that_swap(short))
    assert [each.blocks_to_swap for each in more] == [each for each in (4, 6, 8) if each > fewest.blocks_to_swap]
    asked, said = short.question, []
    for number in (fewest.blocks_to_swap, fewest.blocks_to_swap - 1):
        strategy = fewest.model_copy(update={"blocks_to_swap": number, "checkpointed_blocks": "all"})
        said.append(verdict(rehearsed(strategy).timeline, asked.gpu, beside(asked, strategy), short.band)[0])
    assert said[0] == "FITS" != said[1]


@pytest.mark.slow
def test_siblings_say_what_any_number_of_swapped_blocks_takes_and_copies(
    short: Plan, rehearsed: Callable[[Strategy], RehearsedSize]
) -> None:
    """Of both kinds, all recomputed: of what is there all along to the byte, and no less of the host."""
    for setting in that_swap(short):
        point = max(setting.points, key=lambda each: (each.checkpointed_blocks, each.micro_batch_size))
        size = point.micro_batch_size
        found = rehearsed(setting.strategy.settled(micro_batch_size=size, grad_accum_steps=1, checkpointed_blocks=8))
        known = found.ledger
        assert point.phase == known.deciding.phase
        for category in ("parameter", "engine buffer", "master weight", "optimizer state", "input"):
            assert point.at_peak.get(category, 0) == pytest.approx(known.at_peak.get(category, 0), abs=1)
        assert sum(point.at_peak.values()) == pytest.approx(known.peak_allocated_bytes, rel=1e-3)
        host = host_need(found.host_timeline, found.checkpoint_bytes, short.question.cluster)
        assert host.node_bytes <= point.host_bytes <= host.node_bytes + 1.25 * GIB


@pytest.mark.slow
def test_copies_of_swapped_blocks_are_in_the_step(short: Plan, rehearsed: Callable[[Strategy], RehearsedSize]) -> None:
    """As predicted, which ranks strategies, and as rehearsed: from the second step on, both ways are without the two
    blocks that are there."""
    asked = short.question
    sample = Sample(asked.model, asked.gpu, asked.resolution)
    plain = next(each.strategy for each in short.settings if each.title == "one process, AdamW, LoRA 16 over bf16")
    with Pool() as pool:
        siblings = pool.rehearse(swapping_requests(sample, plain))
    moved = swapping(sample, plain, [each for each in siblings if isinstance(each, RehearsedSize)])
    strategy = plain.model_copy(update={"blocks_to_swap": 8}).settled(
        micro_batch_size=1, grad_accum_steps=1, checkpointed_blocks=8
    )
    weights = moved.grid.weights_of({"transformer_blocks": 4, "single_transformer_blocks": 4})
    copied = weighted(moved.work, weights).micro.at("to device").nbytes
    known = work_of(rehearsed(strategy).timeline, strategy).micro.at("to device").nbytes
    assert 0.9 * known < copied <= known  # but for the batch itself


@pytest.mark.slow
def test_what_fits_without_asks_for_no_rehearsal_of_swapped_blocks(short: Plan) -> None:
    asked = question(SHORT, 12_000, ADAPTERS)
    seen = []

    class Watched(Pool):
        def rehearse(self, requests):  # type: ignore[no-untyped-def]
            seen.extend(requests)
            return super().rehearse(requests)

    sample = Sample(asked.model, asked.gpu, asked.resolution)
    with Watched() as pool:
        found = search(pool, sample, asked, Evidence(), NO_CARDS, lambda _: None)
    assert found.best[0].verdict == "FITS"
    assert seen
    assert not any(each.strategy.blocks_to_swap for each in seen)
    assert [each.choice for each in found.rejected if "PCIe" in each.reason] == [
        "one process, AdamW, LoRA 16 over bf16, weights of blocks on the host"
    ]


@pytest.mark.slow
def test_on_a_card_too_and_what_is_lossy_is_not_looked_at_further() -> None:
    """Over a quantised base adapters fit without, which is lossy: limits are asked of the best alone."""
    pins, further = ADAPTERS.model_copy(update={"checkpointed_blocks": 6}), list[Candidate]()
    asked = question(SHORT, 3400, pins, buckets=())
    sample = Sample(asked.model, asked.gpu, asked.resolution)
    with Pool() as pool, Cards(asked.gpu, shallow=partial(shallowest, asked.model)) as cards:
        found = search(pool, sample, asked, Evidence(), cards, further.append)
        assert not cards.unanswered
    (best,) = found.best
    assert (best.verdict, best.ran is not None, best.candidate.lossless) == ("FITS", True, True)
    assert 0 < best.candidate.strategy.blocks_to_swap <= best.candidate.blocks == 6
    assert any(option.proposal.last_resort == 0 and not option.proposal.lossless for option in found.options)
    assert further == [best.candidate]


@pytest.mark.slow
def test_all_weights_are_swapped_on_a_card_and_the_way_there_is_shown() -> None:
    """On an emulated one: in the backward pass, without masters, since nothing else fits."""
    plan = make_plan(question(SANA, 1500, WHOLE, device="emulated", explain=True, buckets=()))
    strategy = plan.chosen.strategy
    assert (plan.verdict, plan.chosen.ran, plan.chosen.lossless) == ("FITS", True, False)
    assert (strategy.precision, strategy.optimizer_in_backward, strategy.blocks_to_swap >= 3) == ("bf16_sr", True, True)
    assert "FITS with a lossy optimizer" in plans.shown(plan)
    assert all(limit.ran and limit.none == 0 < limit.full for limit in plan.buckets)
    assert any(f"weights of {strategy.blocks_to_swap} on the host" in step.change for step in plan.waterfall)
    assert not any(step.predicted for step in plan.waterfall)
    assert plan.curves[0].ran


@pytest.mark.slow
def test_adapters_are_named_where_all_weights_train_by_a_last_resort_alone() -> None:
    """Unless all weights were asked for, or they fit without."""

    def left_out(mib: int, pins: Pins) -> set[str]:
        asked = question(SANA, mib, pins, buckets=())
        with Pool() as pool:
            sample = Sample(asked.model, asked.gpu, asked.resolution)
            found = search(pool, sample, asked, Evidence(), NO_CARDS, lambda _: None)
        assert found.best[0].verdict == "FITS"
        return {each.choice for each in found.rejected}

    free = Pins(engine="single")
    assert "LoRA" in left_out(1500, free)
    assert "LoRA" not in left_out(1500, WHOLE)
    assert "LoRA" not in left_out(12_000, free)


def titles(asked: Question) -> list[str]:
    return [each.title for each in proposals(asked)[0] if each.strategy.blocks_to_swap]


def test_swapped_blocks_are_proposed_where_they_can_be_trained() -> None:
    alone = Pins(lora_rank=16)
    assert titles(question(FLUX, 12_000, alone)) == [
        "one process, AdamW, LoRA 16 over bf16, weights of blocks on the host"
    ]
    whole = "one process, Adafactor, bf16 without masters, stepped in the backward pass, weights of blocks on the host"
    assert titles(question(FLUX, 12_000, Pins())) == titles(question(FLUX, 12_000, WHOLE)) == [whole]
    for pins, changes in (
        (alone, {"cluster": Cluster(gpus=2)}),
        (Pins(lora_rank=16, engine="fsdp2"), {}),
        (Pins(lora_rank=16, checkpointed_blocks=2), {}),
        (Pins(lora_rank=16, precision="fp16"), {}),
        (Pins(precision="bf16"), {}),
        (Pins(micro_batch_size=2), {"global_batch_size": 4}),
        (Pins(optimizer="paged_adamw_8bit", precision="fp32"), {}),
    ):
        assert titles(question(FLUX, 12_000, pins, **changes)) == [], pins


@pytest.mark.parametrize(("swapped", "recomputed"), [(3, 3), (14, 37), (42, 42), (57, "all")])
def test_a_few_blocks_that_are_swapped_are_recomputed_too(swapped: int, recomputed: int | str) -> None:
    (proposal,) = [each for each in proposals(question(FLUX, 12_000, ADAPTERS))[0] if each.strategy.blocks_to_swap]
    update = {"blocks_to_swap": swapped, "checkpointed_blocks": recomputed}
    asked = Sample(FLUX, catalog.gpu("rtx-4090"), (512, 512)).request(proposal.strategy.model_copy(update=update))
    few = shallowest(FLUX, asked).strategy
    assert Strategy.model_validate(few.model_dump()) == few


def test_no_more_are_swapped_than_are_recomputed() -> None:
    (found,) = [
        each.strategy.blocks_to_swap
        for each in proposals(question(FLUX, 12_000, Pins(lora_rank=16, checkpointed_blocks=20)))[0]
        if each.strategy.blocks_to_swap
    ]
    assert found == 20
