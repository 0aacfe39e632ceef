"""What the search proposes, in which order, and its messages. Nothing runs."""

from __future__ import annotations

import itertools
from typing import Any, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigdit import catalog
from bigdit.catalog import CatalogModel
from bigdit.config.strategy_text import LARGEST_MICRO_BATCH, parse_strategy
from bigdit.memory.process import ByteRange
from bigdit.profile.gpus import EmulatedGpus
from bigdit.search.calibration import UNPROVED, Calibration
from bigdit.search.option import Option, quarters
from bigdit.search.plan import Constraints, Estimate, ResolvedRequest, lossy_by, process, safe_bytes, verdict_of
from bigdit.search.planner import Planner
from bigdit.search.resolve import resolve_request
from bigdit.search.rows import faster_or_slower
from bigdit.search.space import proposals
from bigdit.speed.seconds import Cluster, Interval
from bigdit.strategy import ControlNetSpec, LoraBase, LoraSpec, Strategy
from bigdit.units import MIB

A40 = catalog.gpu("a40")


def resolved(model: str | CatalogModel = "sana-1600m", gpu: str = "a40", **changes: object) -> ResolvedRequest:
    found = catalog.model(model) if isinstance(model, str) else model
    return ResolvedRequest(model=found, gpu=catalog.gpu(gpu), resolution=(1024, 1024)).model_copy(update=changes)


def planner_for(asked: ResolvedRequest) -> Planner:
    """A planner whose emulated GPUs are never asked."""
    return Planner(asked, cast(EmulatedGpus, None), Calibration())


def titles(asked: ResolvedRequest) -> list[str]:
    return [option.title for option in proposals(asked)[0]]


def reasons(asked: ResolvedRequest) -> dict[str, str]:
    return {rejected.choice: rejected.reason for rejected in proposals(asked)[1]}


def test_one_gpu_is_not_sharded_and_offload_is_a_last_resort() -> None:
    found, _ = proposals(resolved())
    assert {option.strategy.engine for option in found if not option.last_resort} == {"single"}
    (stepped,) = (option.title for option in found if option.last_resort == 3)
    assert stepped == "single GPU, Adafactor, bf16 without masters, stepped in the backward pass"
    assert {option.title for option in found if option.last_resort == 1} == {
        "ZeRO-2, optimizer in CPU memory, AdamW",
        "FSDP2, weights and optimizer in CPU memory, AdamW",
    }
    assert (
        "on one GPU they only add buffers"
        in reasons(resolved())["ZeRO-1, ZeRO-2, ZeRO-3 and FSDP2 on one GPU, without CPU offload"]
    )


def test_engines_of_several_gpus_depend_on_accumulation_and_machines() -> None:
    eight = resolved(cluster=Cluster(gpus=8))
    assert titles(eight)[0] == "ZeRO-2 on 8, AdamW"
    assert "ZeRO-1" in reasons(eight)
    accumulated = resolved(cluster=Cluster(gpus=8), global_batch_size=256)
    assert titles(accumulated)[0] == "ZeRO-1 on 8, AdamW"
    assert "ZeRO-2" in reasons(accumulated)
    assert "HSDP 4 × 8, AdamW" in titles(resolved(cluster=Cluster(gpus=32)))


def test_bases_come_first_and_what_varies_them_names_them() -> None:
    found, _ = proposals(resolved())
    for at, option in enumerate(found):
        assert option.base is None or option.base in found[:at]
        in_backward = option.strategy.optimizer_in_backward
        assert in_backward or (option.base is None) == option.lossless


def test_over_several_gpus_what_is_lossy_is_a_last_resort() -> None:
    found, _ = proposals(resolved(cluster=Cluster(gpus=8)))
    assert {each.lossless for each in found} == {True, False}
    assert all((each.last_resort, each.base) == (3, None) for each in found if not each.lossless)


def test_deepspeed_s_buckets_hold_a_block_and_not_half_a_billion() -> None:
    for name in ("sana-600m", "sana-1600m", "flux.1-dev"):
        found, _ = proposals(resolved(name, cluster=Cluster(gpus=8)))
        zero = found[0].strategy.ds_config["zero_optimization"]
        assert 5_000_000 <= zero["reduce_bucket_size"] <= 50_000_000
        assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"]


def test_a_gpu_without_bf16_trains_in_fp16() -> None:
    found, _ = proposals(resolved("pixart-sigma-xl-2-1024", "v100-32g-sxm2", cluster=Cluster(gpus=32)))
    assert {option.strategy.precision for option in found} == {"fp16"}
    assert "does not compute it" in reasons(resolved(gpu="v100-32g-sxm2"))["bf16"]


def test_pins_are_kept() -> None:
    pins = Constraints(engine="fsdp2", optimizer="came", precision="bf16_sr", ema="cpu", cp=1)
    (found,), _ = proposals(resolved(constraints=pins, cluster=Cluster(gpus=8)))
    strategy = found.strategy
    assert (strategy.engine, strategy.optimizer.name, strategy.precision) == ("fsdp2", "came", "bf16_sr")
    assert strategy.ema is not None
    assert strategy.ema.device == "cpu"
    assert not found.lossless


def test_an_ema_is_placed_where_it_was_asked_for() -> None:
    places = {
        ema: {option.strategy.ema and option.strategy.ema.device for option in proposals(asked)[0]}
        for ema in ("none", "auto", "gpu", "cpu")
        for asked in [resolved(constraints=Constraints.model_validate({"ema": ema}))]
    }
    assert places == {"none": {None}, "auto": {"gpu", "cpu"}, "gpu": {"gpu"}, "cpu": {"cpu"}}


def test_as_many_emas_are_proposed_as_were_asked_for() -> None:
    asked = resolved(constraints=Constraints(ema="auto", ema_widths=(0.05, 0.1)))
    assert {each.strategy.ema and each.strategy.ema.widths for each in proposals(asked)[0]} == {(0.05, 0.1)}
    assert "single GPU, AdamW, 2 EMAs in CPU memory" in titles(asked)


def test_adapters_are_proposed_over_every_base_that_the_engine_takes() -> None:
    one, several = (
        resolved(constraints=Constraints(lora=LoraSpec(rank=16)), cluster=Cluster(gpus=gpus)) for gpus in (1, 8)
    )
    assert [title for title in titles(one) if title.startswith("single GPU") and "CPU memory" not in title] == [
        f"single GPU, AdamW, LoRA 16 over {base}" for base in ("bf16", "int8", "nf4")
    ]
    for base in get_args(LoraBase):
        pinned = titles(resolved(constraints=Constraints(lora=LoraSpec(rank=16), lora_base=base)))
        assert {title.rpartition(" over ")[2].partition(",")[0] for title in pinned} == {base}
    assert "FSDP2 on 8, AdamW, LoRA 16 over int8" in titles(several)
    found = {option.strategy.engine for option in proposals(several)[0] if "nf4" in option.title}
    assert found == {"ddp"}


def test_text_encoders_train_on_one_gpu_in_a_precision_that_they_take() -> None:
    asked = {"lora": 16, "lora_text_encoders": True, "features": "online"}
    for gpu, precision in (("rtx-4090", "bf16"), ("v100-32g-sxm2", "fp32")):
        found = [each.strategy for each in proposals(resolve_request("sd3.5-medium", gpu, **asked))[0]]
        assert {(each.engine, each.precision, each.blocks_to_swap) for each in found} == {("single", precision, 0)}
        assert all(each.trains_text for each in found)


def test_a_controlnet_is_sharded_as_a_model_and_frozen_blocks_alone_are_swapped() -> None:
    beside = resolve_request("flux.1-dev", "h100", controlnet=4)
    found = proposals(beside)[0]
    assert {each.strategy.controlnet.blocks for each in found if each.strategy.controlnet} == {4}
    assert {each.strategy.blocks_to_swap for each in found} == {0, 57}
    several = proposals(resolve_request("flux.1-dev", "h100", controlnet=4, gpus=8))[0]
    assert {each.strategy.engine for each in several if not each.last_resort} == {"deepspeed", "fsdp2"}


def test_a_controlnet_comes_over_a_quantised_model_too() -> None:
    found = proposals(resolve_request("flux.1-dev", "rtx-4090", controlnet=4))[0]
    assert {each.strategy.base for each in found} == {"bf16", "int8", "nf4"}
    adamw = [each for each in found if (each.strategy.optimizer.name, each.strategy.precision) == ("adamw", "bf16")]
    assert {each.strategy.base for each in adamw if not each.lossless} == {"int8", "nf4"}
    fixed = resolve_request("flux.1-dev", "rtx-4090", controlnet=4, lora_base="fp8")
    assert {each.strategy.controlnet for each in proposals(fixed)[0]} == {ControlNetSpec(layers=4, base="fp8")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"lora": {"base": "int8"}}, ["quantised base (int8)"]),
        ({"optimizer": {"name": "adamw_8bit"}}, ["8-bit optimizer state"]),
        ({"optimizer": {"name": "adamw_4bit_ao"}}, ["4-bit optimizer state"]),
        ({"optimizer": {"name": "lion_8bit"}}, ["8-bit Lion instead of AdamW"]),
        ({"optimizer": {"name": "came"}, "precision": "bf16_sr"}, ["CAME instead of AdamW", "no fp32 master weights"]),
    ],
)
def test_what_of_a_strategy_is_lossy_is_named(changes: dict[str, Any], words: list[str]) -> None:
    assert lossy_by(Strategy.model_validate(changes)) == words


def test_what_cannot_hold_weights_and_gradients_is_not_run() -> None:
    found, _ = proposals(resolved("flux.1-dev", "rtx-4090"))
    assert {each.strategy.engine for each in found if each.last_resort < 3} == {"deepspeed", "fsdp2"}
    assert reasons(resolved("flux.1-dev", "rtx-4090"))["single GPU, all weights on the GPU"] == (
        "weights and gradients alone take 44.34 GiB of the GPU's 23.60 GiB"
    )


def test_a_settled_strategy_says_the_same_in_deepspeed_s_document() -> None:
    found, _ = proposals(resolved(cluster=Cluster(gpus=8)))
    strategy = found[0].strategy.settled(micro_batch_size=6, grad_accum_steps=3, checkpointed_blocks=4)
    assert Strategy.model_validate(strategy.model_dump()) == strategy
    assert strategy.ds_document["train_micro_batch_size_per_gpu"] == 6
    assert strategy.ds_document["gradient_accumulation_steps"] == 3


@given(st.integers(1, 64), st.integers(1, 64))
def test_micro_batches_divide_a_gpu_s_share_of_the_global_batch(gpus: int, share: int) -> None:
    asked = resolved(cluster=Cluster(gpus=gpus), global_batch_size=gpus * share)
    strategy = Strategy(engine="fsdp2", world_size=gpus)
    sizes = list(planner_for(asked).micro_batch_sizes(strategy))
    assert sizes == [size for size in range(1, share + 1) if share % size == 0]
    assert all(size * planner_for(asked).accumulation(size, strategy) * gpus == gpus * share for size in sizes)


@given(st.integers(2, 64), st.integers(1, 4096))
def test_a_batch_that_gpus_do_not_divide_has_the_passes_of_the_trainer(gpus: int, batch: int) -> None:
    planner = planner_for(resolved(cluster=Cluster(gpus=gpus), global_batch_size=batch))
    strategy = Strategy(engine="fsdp2", world_size=gpus)
    for size in planner.micro_batch_sizes(strategy):
        trained = Strategy(engine="fsdp2", world_size=gpus, micro_batch_size=size, global_batch_size=batch)  # type: ignore[call-arg]
        passes = planner.accumulation(size, strategy)
        assert passes == trained.grad_accum_steps
        settled = strategy.settled(
            micro_batch_size=size, grad_accum_steps=passes, checkpointed_blocks=0, global_batch_size=batch
        )
        assert settled == trained
        assert size == trained.over(gpus)["micro_batch_size"]  # no larger than the passes need


def test_what_steps_in_the_backward_pass_takes_its_share_at_once() -> None:
    strategy = Strategy(optimizer_in_backward=True, gradient_clipping=None)
    assert list(planner_for(resolved(global_batch_size=12)).micro_batch_sizes(strategy)) == [12]
    assert list(planner_for(resolved()).micro_batch_sizes(strategy))[:3] == [1, 2, 3]


def test_without_a_global_batch_every_small_size_is_tried_and_large_ones_in_steps() -> None:
    sizes = list(planner_for(resolved()).micro_batch_sizes(Strategy()))
    assert sizes[:32] == list(range(1, 33))
    assert sizes[-1] <= LARGEST_MICRO_BATCH
    assert all(after / before < 1.1 for before, after in itertools.pairwise(sizes[31:]))


class Affine(Option):
    """Four blocks, each of which saves ten bytes a sample, predicted without attempts."""

    def ran(self, blocks: int) -> dict[int, int]:
        return {size: nbytes for (of, size), nbytes in self.found.items() if of == blocks}

    def uncorrected(self, micro_batch_size: float, blocks: int) -> float:
        return affine(micro_batch_size, blocks)


def affine(micro_batch_size: float, blocks: int) -> float:
    return 100 + micro_batch_size * (50 - 10 * blocks)


def option(title: str = "affine") -> Option:
    found = Affine(title, Strategy())
    found.count = 4
    return found


@given(st.integers(50, 52_000))
def test_the_most_that_fits(limit: int) -> None:
    assert option().largest(0, limit) == min(max((limit - 100) // 50, 0), LARGEST_MICRO_BATCH)


@given(st.integers(1, 20), st.integers(90, 900))
def test_the_fewest_blocks_fit_and_one_less_does_not(size: int, capacity: int) -> None:
    found = option().fewest_blocks(size, capacity)
    if found is None:
        assert option().reserved(size, 4) > capacity
    else:
        assert option().reserved(size, found) <= capacity
        assert found == 0 or option().reserved(size, found - 1) > capacity


def share(found: Option, size: int, blocks: int) -> float:
    return found.reserved(size, blocks) / affine(size, blocks)


def test_a_correction_counts_where_it_was_found_and_fades() -> None:
    made = option()
    made.correct(4, 2, 330)  # of 220
    assert made.reserved(4, 2) == 330
    away = [share(made, size, 2) for size in (4, 5, 8, 32)]
    assert away == sorted(away, reverse=True)
    assert away[-1] > 1.1
    made.correct(4, 2, 275)
    assert made.reserved(4, 2) == 275
    made.correct(16, 2, 290)  # of 580
    assert share(made, 15, 2) < 0.6 < 1.2 < share(made, 5, 2)


def test_options_that_share_activations_share_corrections_until_they_have_their_own() -> None:
    made = option()
    other = option("another")
    other.corrections = made.corrections
    made.correct(4, 2, 330)
    assert other.reserved(4, 2) == 330
    other.correct(1, 0, 75)  # of 150
    assert share(made, 1, 0) > 1.1
    assert share(other, 4, 2) < 0.9


def test_a_prediction_is_judged_by_the_same_bounds() -> None:
    beside = ByteRange(low_bytes=300 * MIB, high_bytes=500 * MIB)

    def judged(reserved_bytes: int) -> str:
        return verdict_of(process(reserved_bytes, beside, UNPROVED), A40.usable_bytes)

    safe = safe_bytes(A40, beside, UNPROVED)
    assert safe == int((A40.usable_bytes - 500 * MIB) / 1.003)
    assert judged(safe) == "FITS"
    assert judged(safe + 2) == "TIGHT"
    assert judged(A40.usable_bytes - 300 * MIB) == "TIGHT"
    assert judged(A40.usable_bytes - 300 * MIB + 1) == "DOES NOT FIT"


def weighed(title: str, nbytes: int, low: float, high: float, optimizer: str = "adamw", blocks: int = 0) -> Estimate:
    """An estimate that takes so many bytes, at `low` to `high` images a second."""
    strategy = parse_strategy([f"optimizer.name={optimizer},checkpointed_blocks={blocks}"])
    return Estimate.model_construct(
        option=title,
        strategy=strategy,
        peak_reserved_bytes=nbytes,
        samples_per_second_per_gpu=Interval(low=low, high=high),
        lossless=not lossy_by(strategy),
    )


def test_room_comes_before_speed_that_cannot_be_reported_apart() -> None:
    def preferred(estimates: list[Estimate], **resorts: Any) -> list[Estimate]:
        planner = planner_for(resolved())
        for each in estimates:
            planner.options[each.option] = Option(each.option, each.strategy, None, resorts.get(each.option, 0))
        return planner.preferred(estimates)

    fastest, roomy = weighed("fastest", 40, 10, 20), weighed("roomy", 20, 9.6, 19.1)
    slower, lossy = weighed("slower", 5, 9.4, 19.9), weighed("lossy", 1, 100, 200, "adamw_8bit")
    order = preferred([lossy, slower, fastest, roomy])
    assert [each.option for each in order] == ["roomy", "fastest", "slower", "lossy"]
    alike = [weighed(str(blocks), 20, 10, 20, blocks=blocks) for blocks in (3, 0, 7)]
    assert [each.blocks for each in preferred(alike)] == [0, 3, 7]
    spared = [
        weighed(str(nbytes), nbytes, 10, 20, blocks=blocks) for nbytes, blocks in ((10000, 9), (10029, 0), (10031, 1))
    ]
    assert [each.blocks for each in preferred(spared)] == [0, 9, 1]
    assert preferred([]) == []
    waiting, whole = weighed("waiting", 1, 11, 21, "adamw_8bit"), weighed("whole", 90, 10, 20, "adamw_8bit")
    order = preferred([waiting, whole, slower], waiting=2)
    assert [each.option for each in order] == ["slower", "whole", "waiting"]


@given(st.floats(0.1, 1e6), st.floats(1, 100), st.floats(0.1, 1e3))
def test_a_rate_turns_an_interval_around(low: float, wider: float, amount: float) -> None:
    seconds = Interval(low=low, high=low * wider)
    rate = seconds.per(amount)
    assert rate.low <= rate.middle * 1.0001
    assert rate.middle <= rate.high * 1.0001
    assert rate.middle * seconds.middle == pytest.approx(amount)


def test_speeds_are_reported_by_what_tells_them_apart() -> None:
    """By the middles of the intervals. If their ends differ more, by those: that end keeps a strategy from being as
    fast."""
    other = Interval(low=1.03, high=1.79)

    def printed(low: float, high: float) -> str:
        return faster_or_slower(Interval(low=low, high=high), other)

    assert printed(1.03, 1.79) == printed(1.032, 1.789) == "as fast"
    assert printed(1.133, 1.969) == "10% faster"
    assert printed(0.927, 1.611) == "10% slower"
    assert printed(1.05, 1.67) == "up to 7% slower"
    assert printed(0.98, 1.88) == "up to 5% slower"


def test_recomputed_blocks_are_looked_at_in_quarters() -> None:
    assert quarters(57) == [0, 14, 28, 42, 57]
    assert quarters(1) == [0, 1]


@pytest.mark.parametrize(("model", "per_node", "ring"), [("14b", 8, 1), ("14b", 4, 2), ("1.3b", 8, 2), ("1.3b", 2, 4)])
def test_keys_go_round_where_heads_or_machines_do_not_divide(model: str, per_node: int, ring: int) -> None:
    """40 heads, and 12."""
    request = resolve_request(f"wan2.1-t2v-{model}", "h100-sxm", gpus=8, gpus_per_node=per_node, cp=8)
    found, _ = proposals(request)
    assert {(each.strategy.cp, each.strategy.cp_ring) for each in found} == {(8, ring)}
