"""The work of a step as an emulated GPU counts it: what is repeated, reduced and moved."""

import pytest
from tiny_models import SANA, SHAPE

from bigdit import catalog
from bigdit.config.strategy_text import parse_strategy
from bigdit.memory import Timeline
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.speed.seconds import Cluster, Interval
from bigdit.speed.step import step_time
from bigdit.speed.work import Load, Operation, work_of
from bigdit.strategy import Strategy

pytestmark = pytest.mark.slow

A100 = catalog.gpu("a100-80g-sxm")
ONE = Strategy()
STRATEGIES = {
    "single": "single",
    "single, 3": "single,grad_accum_steps=3",
    "zero1": "zero1,world_size=8",
    "zero1, 2": "zero1,world_size=8,grad_accum_steps=2",
    "zero2": "zero2,world_size=8",
    "zero2, 2": "zero2,world_size=8,grad_accum_steps=2",
    "zero2-offload": "zero2-offload,world_size=8",
    "fsdp2": "fsdp2,world_size=8",
    "fsdp2, 2": "fsdp2,world_size=8,grad_accum_steps=2",
    "hsdp": "fsdp2,world_size=8,dp_replicate=2",
    "hsdp, 2": "fsdp2,world_size=8,dp_replicate=2,grad_accum_steps=2",
    "activations": "single,offload_activations=true,ema.device=cpu",
    "two": "single,micro_batch_size=2",
    "four": "single,micro_batch_size=4",
    "six": "single,micro_batch_size=6",
}


@pytest.fixture(scope="module")
def recorded(own_cache):
    """Strategy and work of each name in STRATEGIES, with a tiny Sana."""
    found = {}
    with EmulatedGpus(A100, 1) as gpus:
        for name, text in STRATEGIES.items():
            strategy = parse_strategy([text])
            request = StepRequest(model=SANA, batch=SHAPE, strategy=strategy)
            found[name] = strategy, work_of(gpus.attempt(request, counted="step").work, strategy)
    return found


def flops(load: Load) -> float:
    return sum(amount.flops for amount in load.operations.values())


def sent(load: Load, phase: str) -> dict[tuple[str, int], float]:
    return {
        (key.name, key.group_size): amount.nbytes
        for key, amount in load.exchanges.items()
        if key.phase == phase and amount.nbytes > 1e-6
    }


def moved(load: Load, place: str, phase: str) -> float:
    return sum(a.nbytes for key, a in load.operations.items() if key.place == place and key.phase == phase)


def test_accumulation_repeats_the_micro_batches_and_not_the_step(recorded):
    _, once = recorded["single"]
    _, thrice = recorded["single, 3"]
    assert flops(thrice.micro) == flops(once.micro) > 0
    assert flops(once.accumulated(3)) == pytest.approx(flops(thrice.accumulated(3)))
    adamw = Operation("step", "aten._fused_adamw_", "float32", "device")
    assert once.step.operations[adamw] == thrice.step.operations[adamw]
    assert not once.micro.exchanges


def test_reductions_are_where_the_engine_makes_them(recorded):
    for name, every, last in (
        ("zero1", {}, {("all_reduce", 8)}),
        ("zero2", {("all_reduce", 8)}, {}),
        ("fsdp2", {("all_gather", 8), ("reduce_scatter", 8)}, {}),
        ("hsdp", {("all_gather", 4), ("reduce_scatter", 4)}, {("all_reduce", 2)}),
    ):
        for recording in (name, f"{name}, 2"):  # by the engine's rules, and as seen
            _, work = recorded[recording]
            assert set(sent(work.micro, "backward")) == set(every), recording
            assert set(sent(work.last, "backward")) == set(last), recording
        assert sent(recorded[name][1].accumulated(2), "backward") == pytest.approx(
            sent(recorded[f"{name}, 2"][1].accumulated(2), "backward")
        )


def test_what_is_offloaded_crosses_the_link_and_is_computed_on_the_host(recorded):
    _, zero2 = recorded["zero2-offload"]
    params = 16740  # of the tiny Sana: an eighth, with its padding
    assert moved(zero2.micro, "to host", "backward") == pytest.approx(4 * params / 8, rel=0.01)
    assert moved(zero2.step, "to device", "step") == pytest.approx(2 * params / 8, rel=0.01)
    # AdamW's four tensors, read and written
    assert zero2.step.operations[Operation("step", "aten._fused_adamw_", "float32", "host")].nbytes == pytest.approx(
        2 * 4 * 4 * params / 8, rel=0.01
    )
    assert not any("adamw" in key.operator for key in recorded["zero2"][1].step.operations if key.place == "host")
    _, saved = recorded["activations"]
    assert moved(saved.micro, "to host", "forward") == pytest.approx(moved(saved.micro, "to device", "backward"), 0.01)
    assert moved(saved.step, "to host", "ema") == 4 * params
    assert moved(saved.step, "host", "ema") == 3 * 4 * params  # weights and EMA read, the EMA written


def test_offload_shows_in_the_parts(recorded):
    strategy, work = recorded["zero2-offload"]
    offloaded = step_time(work, strategy, A100, Cluster(gpus=8)).parts
    assert {"CPU", "copies to and from CPU memory", "collectives"} <= set(offloaded)
    strategy, work = recorded["single"]
    kept = step_time(work, strategy, A100, Cluster()).parts
    assert "collectives" not in kept
    assert kept["optimizer"].low > 100 * kept.get("CPU", Interval(low=0, high=0)).low


def test_a_micro_batch_between_two_is_worth_their_mean(recorded):
    (_, two), (_, four), (_, six) = recorded["two"], recorded["four"], recorded["six"]
    predicted = (two + six) * 0.5
    assert flops(predicted.accumulated(1)) == pytest.approx(flops(four.accumulated(1)))
    found, real = (step_time(work, ONE, A100, Cluster()).seconds for work in (predicted, four))
    assert found.low == pytest.approx(real.low, rel=1e-3)
    assert found.high == pytest.approx(real.high, rel=1e-3)


def test_a_timeline_without_a_step_is_refused():
    with pytest.raises(ValueError, match="no optimizer step"):
        work_of(Timeline((), (), ()), ONE)
