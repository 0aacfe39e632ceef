"""Plans with blocks' weights in CPU memory: how many, when, and the messages about it."""

from __future__ import annotations

import plans
import pytest
from gpus import of_blocks

from bigdit import catalog
from bigdit.catalog import CatalogModel
from bigdit.profile.gpus import EmulatedGpus
from bigdit.report.page import page
from bigdit.search.answer import make_plan
from bigdit.search.calibration import Calibration
from bigdit.search.plan import Constraints, Plan, ResolvedRequest, record
from bigdit.search.planner import Planner, rate
from bigdit.search.solve import search
from bigdit.search.space import proposals
from bigdit.speed.seconds import Cluster
from bigdit.strategy import LoraSpec

FLUX = catalog.model("flux.1-dev")
SHORT = of_blocks(FLUX, 4, "short-flux")
"""Blocks of two kinds. The larger ones come first."""
SANA = of_blocks(catalog.model("sana-1600m"), 5, "five-sana")
ADAPTERS = Constraints(engine="single", lora=LoraSpec(rank=16))
WHOLE = Constraints(engine="single", full=True)


def resolved(model: CatalogModel, mib: int, pins: Constraints, **changes: object) -> ResolvedRequest:
    gpu = catalog.gpu("rtx-4090").model_copy(update={"usable_mib": mib})
    return ResolvedRequest(model=model, gpu=gpu, resolution=(512, 512), constraints=pins).model_copy(update=changes)


@pytest.fixture(scope="module", autouse=True)
def _cache(own_cache: None) -> None:
    """Attempts that these tests share, from an empty cache."""


@pytest.fixture(scope="module")
def free() -> Plan:
    """Adapters of a short Flux whose frozen weights exceed the GPU."""
    return make_plan(resolved(SHORT, 3400, ADAPTERS))


@pytest.mark.slow
def test_a_quantised_base_is_recommended_where_a_lossless_one_is_much_slower(free: Plan) -> None:
    """The first line says so, and the lossless strategy stands beside it."""
    first, text = free.chosen, plans.shown(free, width=200)
    (lossless, *_) = sorted((row for row in free.front if row.lossless), key=lambda row: -rate(row))
    assert (free.verdict, first.lossless, lossless.verdict) == ("FITS", False, "FITS")
    assert first.strategy.lora is not None
    times = f"up to {rate(first) / rate(lossless):.2f} times as fast as over bf16, which is lossless"
    assert rate(first) > 1.3 * rate(lossless)
    assert f"FITS over a base quantised to {first.strategy.lora.base}, {times}" in text
    assert lossless.reason.endswith("; lossless")


@pytest.mark.slow
def test_the_first_line_has_the_times_that_decided_and_not_those_of_a_smaller_strategy() -> None:
    """The one with the least memory is up to 5 % slower than the fastest over its base, and less than 1.3 times."""
    plan = make_plan(resolved(SHORT, 4000, ADAPTERS, buckets=(), resolution=(1024, 1024)))
    fastest = max(rate(row) for row in plan.front if row.strategy.base == plan.chosen.strategy.base == "nf4")
    times = fastest / max(rate(row) for row in plan.front if row.lossless)
    assert rate(plan.chosen) < fastest
    assert times > 1.3
    assert f"nf4, up to {times:.2f} times as fast as over bf16, which is lossless" in plans.shown(plan, width=200)


@pytest.mark.slow
def test_on_several_gpus_replicas_over_a_quantised_base_are_recommended_where_shards_are_much_slower() -> None:
    """Two GPUs that share the weights gather each block over PCIe."""
    found = make_plan(resolved(SHORT, 3400, Constraints(lora=LoraSpec(rank=16)), cluster=Cluster(gpus=2), buckets=()))
    strategy = found.chosen.strategy
    assert (found.verdict, strategy.engine, strategy.world_size) == ("FITS", "ddp", 2)
    assert strategy.lora is not None
    assert strategy.lora.base in ("int8", "nf4")
    assert "DDP, a replica on each of 2 GPUs" in plans.shown(found, width=200)
    assert any(each.lossless for each in found.front), [each.option for each in found.front]
    assert record(found).strategy == strategy


@pytest.fixture(scope="module")
def short() -> Plan:
    """The same, with weights that must stay in bf16."""
    return make_plan(resolved(SHORT, 3400, ADAPTERS.model_copy(update={"lora_base": "bf16"})))


@pytest.mark.slow
def test_where_nothing_else_fits_weights_wait_on_the_host(short: Plan) -> None:
    strategy = short.chosen.strategy
    assert (short.verdict, short.chosen.lossless) == ("FITS", True)
    assert strategy.lora is not None
    assert strategy.lora.base == "bf16"
    assert 3 <= strategy.blocks_to_swap <= int(strategy.checkpointed_blocks)
    assert short.buckets[0].none == 0  # swapped blocks must be recomputed
    assert record(short).strategy == strategy
    assert f"weights of blocks 1 to {strategy.blocks_to_swap}" in plans.shown(short, width=200) or (
        f"{strategy.blocks_to_swap} of" in plans.shown(short, width=200)
    )
    assert f"block swap: weights of {strategy.blocks_to_swap} of " in page(short)
    assert any(word.startswith("copies") for word in short.chosen.step.parts)


@pytest.mark.slow
def test_of_equally_fast_strategies_the_one_with_the_fewest_swapped_blocks_is_recommended() -> None:
    """More of them would leave GPU memory free for nothing."""
    pins = ADAPTERS.model_copy(update={"lora_base": "bf16"})
    plan = make_plan(resolved(SHORT, 4400, pins, buckets=()))
    chosen, most = plan.chosen, max(plan.front, key=lambda row: row.strategy.blocks_to_swap)
    assert (plan.verdict, most.verdict) == ("FITS", "FITS")
    assert 0 < chosen.strategy.blocks_to_swap < most.strategy.blocks_to_swap
    assert chosen.reason.endswith("; of these it swaps the fewest blocks")
    assert any(rate(row) > rate(chosen) and row.strategy.blocks_to_swap for row in plan.front)


@pytest.mark.slow
def test_copies_of_large_first_blocks_are_predicted_as_they_are_recorded() -> None:
    pins = ADAPTERS.model_copy(update={"lora_base": "bf16"})
    request = resolved(SHORT, 4400, pins, buckets=())
    with EmulatedGpus(request.gpu) as gpus:
        planner = Planner(request, gpus, Calibration())
        recorded = search(planner)
    option = planner.options[recorded.option]
    predicted = planner.estimate(option, recorded.micro_batch_size, recorded.blocks)
    (copies,) = (part for part in recorded.step.parts if part.startswith("copies"))
    assert 4 < recorded.strategy.blocks_to_swap < 8
    assert predicted.step.parts[copies].middle == pytest.approx(recorded.step.parts[copies].middle, rel=0.02)


@pytest.mark.slow
def test_a_base_that_is_fixed_is_planned_alone() -> None:
    pins = ADAPTERS.model_copy(update={"lora_base": "fp8"})
    plan = make_plan(resolved(SHORT, 3400, pins, buckets=()))
    bases = {row.strategy.lora.base for row in plan.front if row.strategy.lora is not None}
    assert (plan.verdict, bases, plan.chosen.step.seconds.low > 0) == ("FITS", {"fp8"}, True)
    assert "lossy: quantised base (fp8)" in plans.shown(plan, width=200)


@pytest.mark.slow
def test_blocks_of_a_quantised_base_are_swapped_where_none_fits_whole_and_two_in_bf16_do_not() -> None:
    plan = make_plan(resolved(SHORT, 2050, ADAPTERS, buckets=()))
    strategy = plan.chosen.strategy
    assert strategy.lora is not None
    assert (plan.verdict, strategy.lora.base, strategy.blocks_to_swap) == ("FITS", "nf4", 8)
    (int8,) = (row for row in plan.front if row.strategy.base == "int8")
    assert (int8.verdict, int8.strategy.blocks_to_swap, rate(int8) < rate(plan.chosen)) == ("FITS", 8, True)
    assert record(plan).strategy == strategy


@pytest.mark.slow
def test_every_base_that_fits_has_a_row(free: Plan) -> None:
    assert {row.strategy.lora.base for row in free.front if row.strategy.lora is not None} == {"bf16", "int8", "nf4"}


@pytest.mark.slow
def test_limits_are_asked_of_what_takes_the_place_of_the_best_lossless_strategy_alone() -> None:
    pins = ADAPTERS.model_copy(update={"checkpointed_blocks": 6})
    asked = resolved(SHORT, 3400, pins, buckets=())
    with EmulatedGpus(asked.gpu) as gpus:
        planner = Planner(asked, gpus, Calibration())
        best = search(planner)
        assert not gpus.unanswered
    lossless = planner.passed_over
    assert lossless is not None
    assert (best.verdict, best.lossless) == ("FITS", False)
    assert (best.source, lossless.source) == ("recorded", "ran")
    assert 0 < lossless.strategy.blocks_to_swap <= lossless.blocks == 6
    assert [*planner.limits] == [best.title]


@pytest.mark.slow
def test_all_weights_are_swapped_and_the_way_there_is_shown() -> None:
    """In the backward pass, without masters, since nothing else fits."""
    plan = make_plan(resolved(SANA, 1500, WHOLE, explain=True, buckets=()))
    strategy = plan.chosen.strategy
    assert (plan.verdict, plan.chosen.lossless) == ("FITS", False)
    assert (strategy.precision, strategy.optimizer_in_backward, strategy.blocks_to_swap >= 3) == ("bf16_sr", True, True)
    assert "FITS with a lossy optimizer" in plans.shown(plan)
    assert all(limit.none == 0 < (limit.full or 0) for limit in plan.buckets)
    assert any(f"weights of {strategy.blocks_to_swap} in CPU memory" in step.change for step in plan.waterfall)
    assert plan.curves


@pytest.mark.slow
def test_adapters_are_named_where_all_weights_train_by_a_last_resort_alone() -> None:
    """Unless full fine-tuning was requested, or fits without."""

    def left_out(mib: int, pins: Constraints) -> set[str]:
        asked = resolved(SANA, mib, pins, buckets=())
        with EmulatedGpus(asked.gpu) as gpus:
            planner = Planner(asked, gpus, Calibration())
            assert search(planner).verdict == "FITS"
        return {each.choice for each in planner.rejected}

    free = Constraints(engine="single")
    assert "LoRA" in left_out(1500, free)
    assert "LoRA" not in left_out(1500, WHOLE)
    assert "LoRA" not in left_out(12_000, free)


def titles(asked: ResolvedRequest) -> list[str]:
    return [each.title for each in proposals(asked)[0] if each.strategy.blocks_to_swap]


def test_swapped_blocks_are_proposed_where_they_can_be_trained() -> None:
    alone = Constraints(lora=LoraSpec(rank=16))
    for engine, gpus in (("single GPU", 1), ("DDP on 2", 2)):
        assert titles(resolved(FLUX, 12_000, alone, cluster=Cluster(gpus=gpus))) == [
            f"{engine}, AdamW, LoRA 16 over {base}, weights of blocks in CPU memory" for base in ("bf16", "int8", "nf4")
        ]
    whole = "single GPU, Adafactor, bf16 without masters, stepped in the backward pass, weights of blocks in CPU memory"
    assert titles(resolved(FLUX, 12_000, Constraints())) == titles(resolved(FLUX, 12_000, WHOLE)) == [whole]
    for pins, changes in (
        (WHOLE.model_copy(update={"engine": None}), {"cluster": Cluster(gpus=2)}),
        (Constraints(lora=LoraSpec(rank=16), engine="fsdp2"), {}),
        (Constraints(lora=LoraSpec(rank=16), checkpointed_blocks=2), {}),
        (Constraints(lora=LoraSpec(rank=16), lora_base="bf16", precision="fp16"), {}),
        (Constraints(precision="bf16"), {}),
        (Constraints(micro_batch_size=2), {"global_batch_size": 4}),
        (Constraints(optimizer="paged_adamw_8bit", precision="fp32"), {}),
    ):
        assert titles(resolved(FLUX, 12_000, pins, **changes)) == [], pins


def test_no_more_are_swapped_than_are_recomputed() -> None:
    found = {
        each.strategy.blocks_to_swap
        for each in proposals(resolved(FLUX, 12_000, Constraints(lora=LoraSpec(rank=16), checkpointed_blocks=20)))[0]
        if each.strategy.blocks_to_swap
    }
    assert found == {20}
