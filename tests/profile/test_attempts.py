"""Attempts and recorded runs: the same bytes and work in any order, and what they say of a step."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from gpus import A40, SMALL, empty_cache, memory, of_blocks, request

from bigdit import catalog
from bigdit.errors import UserError
from bigdit.memory import host_memory
from bigdit.profile.attempt import Attempt, AttemptJob
from bigdit.profile.gpus import EmulatedGpus, Row
from bigdit.speed.work import Load, work_of
from bigdit.strategy import OptimizerName
from bigdit.units import GIB, MIB

pytestmark = pytest.mark.slow

STRATEGIES = (
    "single",
    "single,optimizer.name=adamw_8bit",
    "single,precision=bf16_sr,optimizer.name=came",
    "single,optimizer.name=adamw_schedulefree",
    "single,lora.base=nf4,checkpointed_blocks=all",
    "single,lora.base=nf4,checkpointed_blocks=all,blocks_to_swap=3",
    "single,precision=bf16_sr,optimizer.name=adafactor,optimizer_in_backward=true,gradient_clipping=null,"
    "checkpointed_blocks=all,blocks_to_swap=3",
    "single,checkpointed_blocks=1,checkpointing=selective",
    "single,ema.device=cpu",
    "zero2,world_size=8",
    "zero3,world_size=8,grad_accum_steps=2",
    "zero2-offload,world_size=8",
    "zero3-offload-all,world_size=8",
    "fsdp2,world_size=8",
    "fsdp2,world_size=8,checkpointed_segments.blocks=2",
    "fsdp2,world_size=16,dp_replicate=2,ema.device=gpu",
    "fsdp2,world_size=8,optimizer.name=muon",
    "fsdp2-offload,world_size=8",
)


def waits_once(strategy: str) -> bool:
    oftener = ("swap", "ema.device=cpu")
    return strategy.startswith(("single", "fsdp2,")) and not any(each in strategy for each in oftener)


@pytest.fixture(scope="module")
def first(gpus: EmulatedGpus) -> dict[str, Attempt]:
    """An attempt of each strategy, one after another."""
    return {strategy: gpus.attempt(request(strategy)) for strategy in STRATEGIES}


def test_every_attempt_finds_the_gpu_and_its_host_as_the_first_one_did(
    gpus: EmulatedGpus, first: dict[str, Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reverse order, and with work counted: neither changes a byte."""
    monkeypatch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path / "empty")))
    for strategy in reversed(STRATEGIES):
        again = gpus.attempt(request(strategy), counted="step")
        assert (memory(again), again.phases) == (memory(first[strategy]), first[strategy].phases), strategy
        assert again.launched == first[strategy].launched, strategy
        assert again.host.peak_bytes == pytest.approx(first[strategy].host.peak_bytes, abs=MIB), strategy
        assert again.host.steps_bytes == pytest.approx(first[strategy].host.steps_bytes, abs=MIB), strategy


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if waits_once(each)])
def test_a_step_waits_for_the_gpu_once(first: dict[str, Attempt], strategy: str) -> None:
    """To learn whether its gradients are finite. DeepSpeed and copies to CPU memory wait more often."""
    waits = {phase: each.counts.get("host_syncs", 0) for phase, each in first[strategy].launched.items()}
    assert sum(waits.values()) == 1, waits


def test_an_ema_on_the_gpu_is_a_few_kernels(first: dict[str, Attempt]) -> None:
    """On lists of weights."""
    (found,) = (each for name, each in first.items() if "ema.device=gpu" in name)
    assert found.launched["ema"].launches < 5


def test_a_recorded_run_takes_what_an_attempt_takes_and_every_byte_has_a_category(
    gpus: EmulatedGpus, first: dict[str, Attempt]
) -> None:
    with ThreadPoolExecutor(2) as aside:
        profiles = dict(zip(STRATEGIES, aside.map(lambda each: gpus.profile(request(each)), STRATEGIES), strict=True))
    for strategy, found in profiles.items():
        bare = first[strategy]
        assert {each.phase: each.peak_bytes for each in found.ledger.phases} == {
            phase: each.peak_bytes for phase, each in bare.phases.items()
        }, strategy
        assert found.peak_reserved_bytes == bare.peak_reserved_bytes, strategy
        for phase in found.ledger.phases:
            assert sum(phase.at_peak.values()) == phase.peak_bytes, strategy
        workspace = [block for block in found.timeline.blocks if block.category == "workspace"]
        assert workspace, strategy
        assert all(block.label != "before the first operation" for block in workspace), strategy
        host = host_memory(found.host_timeline)
        assert bare.host.steps_bytes == pytest.approx(host.steps_bytes, abs=4 * MIB), strategy
        # FSDP2 casts its weights as it copies them: the recorder misses the copy of one of them.
        assert -4 * MIB < bare.host.peak_bytes - host.peak_bytes < 24 * MIB, strategy


@pytest.mark.parametrize(
    "strategy",
    [
        *("single", "zero2,world_size=8", "fsdp2,world_size=8", "fsdp2-offload,world_size=8"),
        *("single,optimizer.name=prodigy", "fsdp2,world_size=8,optimizer.name=muon"),
    ],
)
def test_counted_work_is_that_of_the_recorded_run(gpus: EmulatedGpus, strategy: str) -> None:
    asked = request(strategy)
    counted, recorded = gpus.attempt(asked, counted="step"), gpus.profile(asked)
    assert counted.checkpoint_bytes == recorded.checkpoint_bytes
    ours, theirs = work_of(counted.work, asked.strategy), work_of(recorded.timeline, asked.strategy)
    for found, expected in ((ours.micro, theirs.micro), (ours.last, theirs.last), (ours.step, theirs.step)):
        assert amounts(found) == amounts(expected)
    assert ours.micro.at("device").flops > 0


def amounts(load: Load) -> tuple[dict, dict]:
    return dict(load.operations.items()), dict(load.exchanges.items())


def test_what_never_met_its_limit_is_known_without_one(
    first: dict[str, Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path / "empty")))
    with EmulatedGpus(A40, 1) as own:
        limited = own.attempt(request("single"), A40.usable_bytes, to_end=False)
    assert own.attempt(request("single")) == limited  # from the cache: no process answers any more
    assert memory(limited) == memory(first["single"])


def test_an_attempt_within_fewer_bytes_looks_for_room_and_runs_out(gpus: EmulatedGpus) -> None:
    asked = request("fsdp2,world_size=8")
    most = gpus.attempt(asked).peak_reserved_bytes
    exact, less, least = (gpus.attempt(asked, most - missing * MIB) for missing in (0, 2, 1000))
    assert (exact.fits, less.ran, less.fits, least.ran) == (True, True, False, False)
    assert exact.peak_reserved_bytes == most > less.peak_reserved_bytes
    assert "CUDA out of memory" in str(least.out_of_memory)
    assert least.launched == {}
    at_once = gpus.attempt(asked, most - 2 * MIB, to_end=False)
    assert not at_once.fits


def test_the_largest_micro_batch_fits_and_the_next_one_does_not(gpus: EmulatedGpus) -> None:
    def sized(size: int):
        return request("single,checkpointed_blocks=all", size)

    for guess in (1, 9):
        found = gpus.largest(Row(sized, guess), 12 * GIB)
        assert found is not None
        size, reserved = int(found[0]), found[1]
        assert reserved[size] <= 12 * GIB < reserved.get(size + 1, 13 * GIB)
        assert size > 1
        assert gpus.attempt(sized(size), 12 * GIB).fits
        assert not gpus.attempt(sized(size + 1), 12 * GIB).fits
    none = gpus.largest(Row(sized, 1), GIB)
    assert none is not None
    assert none[0] < 1


def test_an_int8_base_halves_the_weights_of_a_recomputed_model(gpus: EmulatedGpus) -> None:
    """Flux.1-dev's bf16 base takes 22.2 GiB. Adapters and saved tensors stay as they are."""
    model = catalog.model("flux.1-dev")
    requests = [request(f"single,checkpointed_blocks=all,lora.base={base}", 1, model) for base in ("bf16", "int8")]
    plain, int8 = (gpus.attempt(each, 44 * GIB).peak_allocated_bytes for each in requests)
    assert plain - int8 == pytest.approx(model.params, rel=0.02)  # a byte for each
    assert int8 < 15 * GIB


def test_an_attempt_tells_what_the_second_step_had_the_gpu_do(gpus: EmulatedGpus, first: dict[str, Attempt]) -> None:
    single, larger = counts(first["single"]), counts(gpus.attempt(request("single", 4)))
    offload, fsdp2 = counts(first["zero2-offload,world_size=8"]), counts(first["fsdp2,world_size=8"])
    assert list(single) == ["forward", "backward", "step"]
    more = {phase: larger[phase]["launches"] - each["launches"] for phase, each in single.items()}
    assert more == {"forward": 2, "backward": 0, "step": 0}  # noise is drawn sample by sample
    assert not any(collectives(each) for each in single.values())
    assert single["backward"]["library_calls"] > 1.5 * single["forward"]["library_calls"] > 0
    assert single["step"]["library_calls"] == 0
    # The CPU waits for the GPU once a step, for whether it is skipped.
    assert {phase: each["host_syncs"] for phase, each in single.items()} == {"forward": 0, "backward": 0, "step": 1}
    # Three blocks, and the rest as one unit, which is not gathered again.
    assert collectives(fsdp2["forward"]) == {"all_gathers": 4}
    assert collectives(fsdp2["backward"]) == {"all_gathers": 3, "reduce_scatters": 4}
    # The process's shard of the gradients is copied to CPU memory in fp32, and that of the weights back in bf16.
    gradients, weights = offload["backward"]["bytes_to_host"], offload["step"]["bytes_to_device"]
    assert gradients == pytest.approx(2 * weights, rel=1e-3)


def counts(attempt: Attempt) -> dict[str, Counter[str]]:
    return {phase: Counter(each.counts) for phase, each in attempt.launched.items()}


def collectives(counted: Counter[str]) -> dict[str, int]:
    apart = ("launches", "library_calls", "fills", "host_syncs", "copies_", "bytes_")
    return {name: count for name, count in counted.items() if not name.startswith(apart)}


@pytest.mark.parametrize("name", ["lumina-image-2.0", "z-image"])
def test_what_takes_other_memory_without_values_is_run_with_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first attempt of its kind, and after one that is cached. Lumina's captions are as long as their masks say.
    Z-Image does not run without values."""
    model = of_blocks(catalog.model(name), 2)
    found, one, other = [], empty_cache(tmp_path / "one"), empty_cache(tmp_path / "other")
    for cache, sizes in ((one, (1,)), (one, (1, 3)), (other, (3,))):
        monkeypatch.setenv("BIGDIT_CACHE", str(cache))
        with EmulatedGpus(catalog.gpu("h100-sxm"), 1) as own:
            attempts = [own.attempt(request("single", size, model)) for size in sizes]
        assert all(each.ran for each in attempts)
        found.append(memory(attempts[-1]))
    assert found[1] == found[2]


@pytest.mark.parametrize("precision", ["bf16", "bf16_sr"])
def test_what_an_optimizer_takes_does_not_follow_from_values(gpus: EmulatedGpus, precision: str) -> None:
    """The first attempt of a kind has values, and those of other optimizers have none."""
    for optimizer in get_args(OptimizerName):
        strategy = f"single,precision={precision},optimizer.name={optimizer}"
        models = [of_blocks(SMALL, 1), of_blocks(SMALL, 1, f"sana-{optimizer}")]
        try:
            of_kind, alone = (request(strategy, 2, model) for model in models)
        except UserError:  # an optimizer without stochastic rounding
            continue
        assert memory(gpus.attempt(of_kind)) == memory(gpus.attempt(alone)), optimizer


@pytest.mark.parametrize(
    "strategy",
    [
        "single,precision=bf16_sr,optimizer.name=adafactor,gradient_clipping=null,optimizer_in_backward=true",
        "zero2-offload,world_size=8",
        "fsdp2-offload,world_size=8",
    ],
)
def test_moving_gradients_and_asking_whether_to_step_read_nothing_that_memory_may_follow_from(
    gpus: EmulatedGpus, strategy: str
) -> None:
    assert gpus.attempt(request(strategy)).reads == 0


def test_a_tensor_may_take_more_than_the_gpu_has(gpus: EmulatedGpus) -> None:
    """Without a limit. HunyuanVideo's attention masks take 65 GB of the 48. Of 1.9 TiB an attempt says so."""
    model = of_blocks(catalog.model("hunyuanvideo-1.5-720p"), 1)
    attempt = gpus.attempt(request("single", 2, model))
    assert attempt.ran
    assert attempt.peak_reserved_bytes > 2 * A40.usable_bytes
    for ask in (gpus.attempt, gpus.profile):
        with pytest.raises(UserError, match=r"fits no GPU: CUDA out of memory\. Tried to allocate 9[14]\d\.\d\d GiB$"):
            ask(request("single", 60, model))


def test_a_process_that_dies_is_a_line_and_the_next_question_has_another() -> None:
    asked = [AttemptJob(request=request("single", 12), capacity_bytes=40 * GIB)]
    with EmulatedGpus(A40, 2) as own, ThreadPoolExecutor(1) as aside:
        before = own.attempt(request("single", 2))
        dies = aside.submit(own.attempts, asked)
        while not dies.done():
            for fork in filter(None, (slot.fork for slot in own._pool._slots)):
                with suppress(ProcessLookupError):
                    os.kill(fork, signal.SIGKILL)
        assert not isinstance(dies.result()[0], Attempt)
        (why,) = own.unanswered
        assert why.startswith(f"short-sana on an emulated GPU ended with status {-signal.SIGKILL}")
        (after,) = own.attempts(asked)
    assert isinstance(after, Attempt)
    assert after.peak_allocated_bytes > before.peak_allocated_bytes


def test_attempts_of_any_number_of_processes_follow_each_other(gpus: EmulatedGpus) -> None:
    """On one GPU. Each process has one process group."""
    asked = [request(f"fsdp2,world_size={ranks}", size) for ranks, size in ((2, 2), (4, 2), (2, 1))]
    two, four, less = (gpus.attempt(each) for each in asked)
    assert two.peak_allocated_bytes > four.peak_allocated_bytes
    assert two.peak_allocated_bytes > less.peak_allocated_bytes
