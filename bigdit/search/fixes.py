"""Where nothing that was asked for fits: the nearest that does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from bigdit.catalog import Gpu, gpus
from bigdit.errors import UserError
from bigdit.profile.cards import Cards
from bigdit.profile.lanes import WorkerError
from bigdit.search.candidates import Option, Planner, fitting, preferred, safe_bytes
from bigdit.search.explore import hopeful
from bigdit.search.plan import Choice
from bigdit.search.question import Pins, Question
from bigdit.search.rows import as_ran
from bigdit.search.solve import explored, run
from bigdit.search.space import proposals
from bigdit.spec import BITSANDBYTES
from bigdit.speed.seconds import StepTime
from bigdit.units import gib

MORE_CARDS = (2, 4, 8)
"""As many times the GPUs that were asked for."""

ADAPTER_RANK = 16

MOST_RUN = 6
"""Of each way out: each that does not fit moves the prediction of the next."""


def fixes(planner: Planner, nearest: Choice, step_on: Callable[[Gpu], StepTime]) -> tuple[Choice, ...]:
    """What fits, one for each way out: without the pins, more GPUs, adapters, more host memory, a larger GPU. `nearest`
    is what comes nearest of what was asked for, and `step_on` its time on other GPUs. All of them run."""
    question = planner.question

    def first(ways: Iterable[tuple[str, Question]]) -> list[Choice]:
        for why, other in ways:
            best = _best(replace(planner, question=other))
            if best is not None:
                return [best.model_copy(update={"reason": why})]
        return []

    ways = (_unpinned(question), _more_cards(question), _adapters(question))
    grown = [*_more_host(question, nearest), *_larger_gpu(planner, nearest, step_on)]
    return (*(choice for way in ways for choice in first(way)), *grown)


def _unpinned(question: Question) -> Iterator[tuple[str, Question]]:
    pins = question.pins
    if pins.features == "online":
        cached = pins.model_copy(update={"features": "cached"})
        yield "encode once, and train from cached features", question.model_copy(update={"pins": cached})
    stays = ("features", "ema", "ema_widths", "lora_rank", "full")
    free = Pins(**{key: getattr(pins, key) for key in stays})
    if pins != free:
        yield "without what was fixed", question.model_copy(update={"pins": free})


def _more_cards(question: Question) -> Iterator[tuple[str, Question]]:
    """FSDP2 with AdamW, or the optimizer that is pinned, on the fewest GPUs."""
    pins = question.pins.model_copy(update={"engine": "fsdp2", "optimizer": question.pins.optimizer or "adamw"})
    if pins.optimizer in BITSANDBYTES:
        pins = pins.model_copy(update={"optimizer": "adamw_8bit_ao"})
    for times in MORE_CARDS:
        count = question.cluster.gpus * times
        cluster = question.cluster.model_copy(update={"gpus": count})
        if count <= cluster.gpus_per_node or count % cluster.gpus_per_node == 0:
            more = question.over(cluster).model_copy(update={"pins": pins})
            yield f"{count} GPUs instead of {question.cluster.gpus}", more


def _adapters(question: Question) -> Iterator[tuple[str, Question]]:
    if question.pins.lora_rank is None and not question.pins.full:
        pins = Pins(features=question.pins.features, lora_rank=ADAPTER_RANK)
        yield "LoRA over frozen weights: another training", question.model_copy(update={"pins": pins})


def _best(planner: Planner) -> Choice | None:
    """The preferred one that fits, a last resort where nothing else does."""
    proposed, _ = proposals(planner.question)
    options: list[Option] = []
    for resort in sorted({each.last_resort for each in proposed}):
        group = [each for each in proposed if each.last_resort == resort]
        explored(planner, group, hopeful(planner, group).engines, options)
        for _ in range(MOST_RUN):
            order = preferred(each for option in options for each in fitting(planner, option))
            (ran,) = run(planner, order[:1]) if order else (None,)
            if ran is None:
                break
            if ran.verdict == "FITS":
                return as_ran(planner, ran)
    return None


def _more_host(question: Question, nearest: Choice) -> list[Choice]:
    """`nearest` as it stands, where it is the host alone that has too little."""
    if nearest.headroom_bytes < 0 or not question.short_of_host(nearest.host_bytes):
        return []
    return [nearest.model_copy(update={"verdict": "FITS", "reason": _host(question, nearest)})]


def _host(question: Question, nearest: Choice) -> str:
    return f"{gib(nearest.host_bytes)} of host RAM a machine, instead of {gib(question.host_memory_bytes)}"


def _larger_gpu(planner: Planner, nearest: Choice, step_on: Callable[[Gpu], StepTime]) -> list[Choice]:
    """The smallest GPU of the catalogue on which `nearest` runs as it stands, in a machine of as much memory as that
    takes."""
    question, needed = planner.question, nearest.process.high_bytes
    if needed <= question.gpu.usable_bytes:
        return []
    larger = [
        gpu
        for gpu in (each.reserving() for each in gpus.gpus())
        if gpu.usable_bytes >= needed and gpu.tflops.computes(nearest.strategy.precision)
    ]
    for gpu in sorted(larger, key=lambda each: each.usable_bytes)[:2]:
        other = replace(planner, question=question.model_copy(update={"gpu": gpu}))
        room = safe_bytes(gpu, other.non_torch(nearest.strategy), planner.band)
        try:
            with Cards(gpu, 1) as cards:
                attempt = cards.attempt(other.request(nearest.strategy), room, to_end=False)
        except (UserError, WorkerError):
            continue
        if not attempt.fits:
            continue
        step, samples = step_on(gpu), nearest.strategy.micro_batch_size * nearest.strategy.grad_accum_steps
        short = question.short_of_host(nearest.host_bytes)
        update = {
            "title": f"{nearest.title}, on {gpu.title}",
            "verdict": "FITS",
            "phases": {phase: each.peak_bytes for phase, each in attempt.phases.items()},
            "peak_allocated_bytes": attempt.peak_allocated_bytes,
            "peak_reserved_bytes": attempt.peak_reserved_bytes,
            "step": step,
            "samples_per_second_per_card": step.seconds.per(samples),
            "headroom_bytes": gpu.usable_bytes - needed,
            "reason": f"a larger GPU, and {_host(question, nearest)}" if short else "a larger GPU",
        }
        return [nearest.model_copy(update=update)]
    return []
