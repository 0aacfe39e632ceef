"""Plans on emulated GPUs: what is shown has run, limits are exact, and the verdict does not depend on how it is
asked."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from gpus import A40, SMALL, empty_cache, request

from bigdit.config.strategy_text import LARGEST_MICRO_BATCH
from bigdit.emulator.interpreter import cuda_python
from bigdit.profile.attempt import Attempt, AttemptJob
from bigdit.profile.gpus import EmulatedGpus, Row
from bigdit.profile.pool import WorkerError
from bigdit.report import words
from bigdit.search.answer import make_plan
from bigdit.search.calibration import Calibration
from bigdit.search.explore import explore, hopeful
from bigdit.search.option import Option
from bigdit.search.plan import Constraints, ResolvedRequest, node_bytes
from bigdit.search.planner import Planner
from bigdit.search.resolve import resolve_request
from bigdit.search.space import proposals
from bigdit.units import GIB, MIB, gib

pytestmark = pytest.mark.usefixtures("own_cache")

ONLY = Constraints(engine="single", optimizer="adamw", checkpointed_blocks=0)
SMALLER = A40.model_copy(update={"usable_mib": 12 * GIB // MIB})


def resolved(**changes: object) -> ResolvedRequest:
    return ResolvedRequest(model=SMALL, gpu=SMALLER, resolution=(1024, 1024), constraints=ONLY).model_copy(
        update=changes
    )


def pinned(pins: Constraints, **changes: object) -> Constraints:
    return pins.model_copy(update=changes)


@pytest.mark.slow
def test_the_largest_is_found_from_any_guess() -> None:
    with EmulatedGpus(A40) as emulated:
        guesses = [(0, GIB), (1, 1), (40.5, MIB), (LARGEST_MICRO_BATCH, 0)]
        rows = [Row(partial(request, "single"), guess, sample_bytes) for guess, sample_bytes in guesses]
        found, answers, before = [], list[int](), 0
        emulated.done = answers.append
        for row in rows:
            found.append(emulated.largest(row, 12 * GIB))
            assert len(answers) - before <= 9  # a poor guess costs a few attempts, not one for each size
            before = len(answers)
        (size,) = {int(each[0]) for each in found if each is not None}
        runs = emulated.attempts(
            [AttemptJob(request=request("single", size + more), capacity_bytes=12 * GIB) for more in (0, 1)]
        )
        none = emulated.largest(rows[0], GIB)
    assert [isinstance(run, Attempt) and run.fits for run in runs] == [True, False]
    assert none is not None
    assert int(none[0]) == 0
    assert all(each is not None and each[1][size] <= 12 * GIB for each in found)


@pytest.mark.slow
def test_a_plan_ran_and_so_did_its_alternatives_and_its_limit_and_one_more_did_not() -> None:
    asked = resolved()
    plan = make_plan(asked)
    (limit,) = plan.buckets
    assert plan.verdict == "FITS"
    assert plan.emulated.startswith(f"{plan.versions['torch']} CUDA ")  # the build that ran, not the one that asked
    assert limit.none is not None
    assert 1 <= plan.chosen.strategy.micro_batch_size <= limit.none
    assert all(choice.step.launches is not None and choice.step.launches.counted for choice in plan.front)
    assert not any(choice.verdict == "DOES NOT FIT" for choice in plan.front)
    with EmulatedGpus(SMALLER) as emulated:
        planner = Planner(asked, emulated, Calibration())
        room = planner.capacity(plan.chosen.strategy)
        sizes = [plan.chosen.strategy.with_micro_batch_size(limit.none + more) for more in (0, 1)]
        runs = emulated.attempts(
            [AttemptJob(request=planner.step_request(each), capacity_bytes=room) for each in sizes]
        )
    assert [isinstance(run, Attempt) and run.fits for run in runs] == [True, False]
    fits, more = (make_plan(resolved(constraints=pinned(ONLY, micro_batch_size=limit.none + more))) for more in (0, 1))
    assert (fits.verdict, fits.buckets) == ("FITS", plan.buckets)
    assert more.verdict != "FITS"
    assert more.buckets == plan.buckets  # of what does not fit they ran as well
    assert more.chosen.process.high_bytes > SMALLER.usable_bytes
    kept, recomputed = plan.curves.values()
    assert [max(each) for each in (kept, recomputed)] == [limit.none, limit.full]
    assert all(list(each.values()) == sorted(each.values()) for each in plan.curves.values())
    assert max(kept.values()) <= SMALLER.usable_bytes
    ran = {each.micro_batch_size: each for each in plan.ran if each.option == plan.chosen.option and not each.blocks}
    for size, nbytes in kept.items():
        assert (ran[size].process.high_bytes, ran[size].verdict) == (nbytes, "FITS")
    assert [size for size, each in ran.items() if each.source == "recorded"] == [plan.chosen.micro_batch_size]


@pytest.mark.slow
def test_the_verdict_without_a_limit_is_that_within_it() -> None:
    """The bytes that torch reserves without a limit decide whether steps fit: with fewer bytes torch would free and
    retry."""
    with EmulatedGpus(A40) as emulated:
        asked = request("single,checkpointed_blocks=1", 4)
        wanted = emulated.attempt(asked).peak_reserved_bytes
        enough, short = emulated.attempts(
            [AttemptJob(request=asked, capacity_bytes=each) for each in (wanted, wanted - 2 * MIB)]
        )
    assert isinstance(enough, Attempt)
    assert isinstance(short, Attempt)
    assert (enough.fits, enough.peak_reserved_bytes, short.fits) == (True, wanted, False)


@pytest.mark.slow
def test_of_images_turned_by_a_quarter_as_many_fit_and_one_more_does_not() -> None:
    """The plan knows both from the attempts of the other bucket."""
    plan = make_plan(resolved(resolution=(512, 1024), buckets=((1024, 512),)))
    one, turned = plan.buckets
    assert one.none == turned.none
    assert turned.none is not None
    assert (one.full is None, turned.full) == (False, None)  # near the planned size
    with EmulatedGpus(SMALLER) as emulated:
        planner = Planner(resolved(resolution=(1024, 512)), emulated, Calibration())
        sizes = [plan.chosen.strategy.with_micro_batch_size(turned.none + more) for more in (0, 1)]
        room = planner.capacity(plan.chosen.strategy)
        runs = emulated.attempts(
            [AttemptJob(request=planner.step_request(each), capacity_bytes=room) for each in sizes]
        )
    assert [isinstance(run, Attempt) and run.fits for run in runs] == [True, False]


@pytest.mark.slow
def test_the_way_from_the_copied_setting_runs_where_the_gpu_is_too_small_for_it() -> None:
    small = A40.model_copy(update={"usable_mib": 8 * GIB // MIB})
    plan = make_plan(resolved(gpu=small, constraints=pinned(ONLY, micro_batch_size=2), explain=True))
    first, *_, last = plan.waterfall
    assert first.process_bytes > small.usable_bytes
    assert first.verdict == "DOES NOT FIT"
    assert (last.process_bytes, last.verdict) == (plan.chosen.process.high_bytes, plan.verdict)
    assert len(plan.waterfall) >= 4
    assert any("encoders leave" in step.saved_by for step in plan.waterfall)


@pytest.mark.slow
def test_curves_run_beyond_a_global_batch_and_nothing_else_does() -> None:
    plan = make_plan(resolved(gpu=A40, global_batch_size=4))
    assert plan.verdict == "FITS"
    assert max(size for curve in plan.curves.values() for size in curve) > 4
    assert {each.micro_batch_size for each in plan.ran} <= {1, 2, 4}


@pytest.mark.slow
def test_a_plan_of_which_a_step_could_not_be_run_says_so_and_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = resolved(gpu=A40, constraints=pinned(ONLY, micro_batch_size=2))
    ends = tmp_path / "python"
    ends.write_text(f'#!/bin/sh\ncase "$*" in *bigdit.profile*) exit 7;; esac\nexec {cuda_python()} "$@"\n')
    ends.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("BIGDIT_CUDA_PYTHON", str(ends))
        with pytest.raises(WorkerError, match=r"short-sana on an emulated GPU ended with status 7 and no result"):
            make_plan(asked)
    plan = make_plan(asked)
    assert plan.verdict == "FITS"
    assert not any("not run" in notice for notice in plan.notices)
    assert make_plan(asked) == plan  # which is cached


@pytest.mark.slow
def test_no_micro_batch_is_looked_for_where_the_host_is_short() -> None:
    plan = make_plan(resolved(gpu=A40, host_memory_bytes=MIB))
    assert (plan.verdict, plan.short_of_host, plan.buckets, plan.curves) == ("DOES NOT FIT", True, (), {})


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["single", "fsdp2-offload"])
def test_a_machine_that_is_only_assumed_is_a_line_and_no_verdict(engine: Literal["single", "fsdp2-offload"]) -> None:
    """Nor is it a reason to reject an engine, if nothing takes less."""
    asked = resolved(
        gpu=A40, constraints=pinned(ONLY, engine=engine, full=True), host_memory_bytes=GIB, host_assumed=True
    )
    plan = make_plan(asked)
    assert (plan.verdict, plan.request, plan.chosen.verdict) == ("FITS", asked, "FITS")
    assert plan.buckets[0].none is not None
    assert plan.buckets[0].none >= plan.chosen.strategy.micro_batch_size
    assert {each.verdict for each in plan.ran} >= {"FITS"}
    (line,) = words.host(plan)
    assert line.startswith(f"CPU memory: {gib(plan.host.node_bytes)} needed per machine, more than the 1.00 GiB ")


def test_a_state_that_is_more_than_the_gpu_for_sure_needs_no_attempt() -> None:
    asked, ran = resolve_request("flux.1-dev", "h100", full=True), list[int]()
    group = [each for each in proposals(asked)[0] if not each.last_resort]
    assert {each.strategy.optimizer.name for each in group} == {"adamw", "adamw_8bit", "came"}
    with EmulatedGpus(A40) as emulated:
        emulated.done = ran.append
        planner = Planner(asked, emulated, Calibration())
        assert hopeful(planner, group) == ([], [])
    assert (ran, [each.reason for each in planner.rejected]) == ([], ["its state alone takes more than the GPU has"])


@pytest.mark.slow
def test_a_gpu_that_has_nothing_to_do_begins_with_what_may_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path)))
    one, other = (pinned(ONLY, engine=engine) for engine in ("fsdp2-offload", "single"))
    first, later = (proposals(resolved(gpu=A40, constraints=each))[0] for each in (one, other))
    with EmulatedGpus(A40, 2) as emulated:
        planner = Planner(resolved(gpu=A40), emulated, Calibration())
        assert hopeful(planner, first, later) == (first, [])
        begun = {*(tmp_path / "attempts").iterdir()}
        assert explore(planner, [*first, *later]) == {}
        assert {*(tmp_path / "attempts").iterdir()} == begun


@pytest.mark.slow
def test_an_engine_whose_state_its_machine_does_not_hold_is_not_looked_at() -> None:
    """Of engines that the machine does not hold, the one with another optimizer is named."""
    asked = resolved(gpu=A40, constraints=pinned(ONLY, engine="fsdp2-offload"), host_memory_bytes=5 * GIB)
    least = node_bytes(12 * (asked.model.params or 0), asked.cluster)
    asked = asked.model_copy(update={"host_memory_bytes": least + MIB})
    engines, _ = proposals(asked)
    either = resolved(gpu=A40, constraints=Constraints(engine="single"), host_memory_bytes=MIB)
    both = [each for each in proposals(either)[0] if not each.last_resort]
    with EmulatedGpus(A40) as emulated:

        def judged(of: ResolvedRequest, group: list[Option]) -> tuple[list[Option], list[Option], list[str]]:
            planner = Planner(of, emulated, Calibration())
            return *hopeful(planner, group), [each.choice for each in planner.rejected]

        def state_bytes(of: ResolvedRequest, group: list[Option]) -> float:
            """A machine's bytes, from the reason for rejecting an engine."""
            planner = Planner(of, emulated, Calibration())
            hopeful(planner, group)
            printed = re.match(r"its state and saving it take ([\d.]+) GiB of CPU memory", planner.rejected[0].reason)
            assert printed
            return float(printed[1]) * GIB

        (engine,) = engines
        assert judged(asked, engines) == ([], engines, [engine.title])
        never = asked.model_copy(update={"host_memory_bytes": least - MIB})  # without an attempt
        assert (judged(never, engines), state_bytes(never, engines)) == (
            ([], engines, [engine.title]),
            pytest.approx(least, rel=0.01),
        )
        enough = asked.model_copy(update={"host_memory_bytes": round(state_bytes(asked, engines) + 0.01 * GIB)})
        assert judged(enough, engines) == (engines, [], [])
        adamw = round(state_bytes(either, both[:1]) - 0.01 * GIB)
        less = either.model_copy(update={"host_memory_bytes": adamw})
        assert judged(less, both) == (both[:1], [], ["single GPU, AdamW"])


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 8])
def test_what_is_predicted_is_near_what_runs(gpus: int, record_property) -> None:  # type: ignore[no-untyped-def]
    """Reserved bytes at sizes between those that ran, and beyond; CPU memory; the work of a step."""
    from bigdit.speed.seconds import Cluster

    asked = resolved(
        gpu=A40, constraints=Constraints(engine="single" if gpus == 1 else "fsdp2", cp=1), cluster=Cluster(gpus=gpus)
    )
    proposed = [each for each in proposals(asked)[0] if not each.last_resort]
    with EmulatedGpus(A40) as emulated:
        planner = Planner(asked, emulated, Calibration())
        rejected = explore(planner, proposed)
        off: list[float] = []
        for option in planner.options.values():
            for size, blocks in ((1, 0), (6, 2), (12, SMALL.block_count)):
                strategy = option.strategy.settled(
                    micro_batch_size=size, grad_accum_steps=1, checkpointed_blocks=blocks
                )
                ran = emulated.attempt(planner.step_request(strategy))
                off.append(option.reserved(size, blocks) / ran.peak_reserved_bytes - 1)
    assert rejected == {}
    assert max(map(abs, off)) < 0.2
    record_property("found", f"{gpus} GPUs: reserved bytes predicted {min(off):+.1%} to {max(off):+.1%} off")


def test_a_step_in_the_backward_pass_takes_the_global_batch_at_once() -> None:
    """Also in the curves of smaller micro-batches, which ran."""
    fixed = Constraints(engine="single", optimizer="adafactor", precision="bf16_sr")
    asked = resolved(constraints=fixed, resolution=(256, 256), global_batch_size=8)
    for mib, verdict in ((1500, "FITS"), (1100, "TIGHT")):
        plan = make_plan(asked.model_copy(update={"gpu": A40.model_copy(update={"usable_mib": mib})}))
        strategy = plan.chosen.strategy
        assert (plan.verdict, strategy.optimizer_in_backward) == (verdict, True)
        assert (strategy.micro_batch_size, strategy.grad_accum_steps, strategy.global_batch_size) == (8, 1, 8)
