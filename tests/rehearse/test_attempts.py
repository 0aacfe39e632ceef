"""Attempts on emulated cards: each finds the card as the first one did, and tells what its steps took and launched."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from cards import A40, SMALL, empty_cache, request

from bigdit import catalog
from bigdit.catalog import CatalogModel
from bigdit.errors import UserError
from bigdit.memory.allocator import replay
from bigdit.profile.attempt import Attempt, Attempts, Shallow
from bigdit.rehearse.card.client import Card
from bigdit.rehearse.pool import Pool
from bigdit.profile.request import StepRequest
from bigdit.profile.cards import Cards
from bigdit.search.predict.anchors import shallowest
from bigdit.search.predict.sibling import depths, sibling
from bigdit.spec import OptimizerName
from bigdit.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("own_cache")

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
    "fsdp2-offload,world_size=8,optimizer.implementation=foreach",
    "single,ema.device=cpu",
)


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
def test_an_int8_base_halves_the_weights_of_a_recomputed_model() -> None:
    """Of Flux.1-dev, whose base in bf16 takes 22.2 GiB; the adapters and what is saved stay as they are."""
    model = catalog.model("flux.1-dev")
    requests = [request(f"single,checkpointed_blocks=all,lora.base={base}", 1, model) for base in ("bf16", "int8")]
    with Attempts(A40) as card:
        plain, int8 = (card.run(each, 44 * GIB).peak_allocated_bytes for each in requests)
    assert plain - int8 == pytest.approx(model.params, rel=0.02)  # a byte for each
    assert int8 < 15 * GIB


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


def of_blocks(name: str, blocks: int) -> CatalogModel:
    whole = catalog.model(name)
    return sibling(whole, dict.fromkeys(depths(whole), blocks))


def memory_of(cache: Path, sizes: tuple[int, ...], shallow: Shallow) -> dict[str, tuple[int, int, int]]:
    """What four blocks of each model take at the last of the sizes, which are asked one after another."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, Attempts(catalog.gpu("h100-sxm"), shallow=shallow) as card:
        patch.setenv("BIGDIT_CACHE", str(empty_cache(cache)))
        for name in MODELS:
            runs = [card.run(request("single", size, of_blocks(name, 4)), 78 * GIB) for size in sizes]
            assert all(each.ran for each in runs)
            found[name] = runs[-1].memory
    return found


def fewer_blocks(asked: StepRequest) -> StepRequest:
    return shallowest(of_blocks(asked.model.name, 4), asked)


@pytest.fixture(scope="module")
def third_and_first(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[int, int, int]]]:
    """What the models take as the third of their kind, of which fewer blocks told whether values matter, and as the
    first, with values, in a process that has seen no other of it."""
    asked = (((1, 2, 3), fewer_blocks), ((3,), lambda request: request))
    return [memory_of(tmp_path_factory.mktemp("asked"), *each) for each in asked]


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
