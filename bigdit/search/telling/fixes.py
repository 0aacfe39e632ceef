"""Where nothing that was asked for fits: the nearest that does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from bigdit.catalog import Gpu, gpus
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import Candidate, Option, capacity, fitting, preferred
from bigdit.profile.cards import NO_CARDS, Device
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.explore import explore, hopeful
from bigdit.search.finding.space import proposals
from bigdit.search.finding.swapped import swapped
from bigdit.search.plan import Choice
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Pins, Question
from bigdit.search.telling.choices import as_they_ran
from bigdit.spec import BITSANDBYTES
from bigdit.speed.seconds import StepTime
from bigdit.units import gib

MORE_CARDS = (2, 4, 8)
"""As many times the cards that were asked for."""

ADAPTER_RANK = 16

UNLIKE = 0.05
"""Cards of another architecture take other workspaces and contexts: so much of a margin is asked of a larger one."""


MOST_RUN = 6
"""Of each way out, on emulated cards: each that does not fit there moves the prediction of the next."""


def fixes(
    pool: Pool,
    sample: Sample,
    question: Question,
    evidence: Evidence,
    smallest: Choice,
    step_on: Callable[[Gpu], StepTime],
    device: Device = NO_CARDS,
) -> tuple[Choice, ...]:
    """What would fit, one for each way out: without the pins, more cards, adapters, a larger card. `smallest` is what
    comes nearest of what was asked for, and `step_on` its time on other cards. Those that are for cards of the
    question's kind run on the device."""

    def first(ways: Iterable[tuple[str, Question]]) -> list[Choice]:
        for why, other in ways:
            best = _best(pool, sample, other, evidence, device)
            if best is not None:
                return [best.model_copy(update={"reason": why})]
        return []

    ways = (_unpinned(question), _more_cards(question), _adapters(question))
    grown = [*_more_host(question, smallest), *_larger_card(question, smallest, step_on)]
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
    """FSDP2 with AdamW, or the optimizer that is pinned, on the fewest cards."""
    pins = question.pins.model_copy(update={"engine": "fsdp2", "optimizer": question.pins.optimizer or "adamw"})
    if pins.optimizer in BITSANDBYTES:
        pins = pins.model_copy(update={"optimizer": "adamw_8bit_ao"})
    for times in MORE_CARDS:
        cards = question.cluster.gpus * times
        cluster = question.cluster.model_copy(update={"gpus": cards})
        if cards <= cluster.gpus_per_node or cards % cluster.gpus_per_node == 0:
            more = question.over(cluster).model_copy(update={"pins": pins})
            yield f"{cards} cards instead of {question.cluster.gpus}", more


def _adapters(question: Question) -> Iterator[tuple[str, Question]]:
    if question.pins.lora_rank is None and not question.pins.full:
        pins = Pins(features=question.pins.features, lora_rank=ADAPTER_RANK)
        yield "adapters beside frozen weights: another training", question.model_copy(update={"pins": pins})


def _best(pool: Pool, sample: Sample, question: Question, evidence: Evidence, device: Device) -> Choice | None:
    """The preferred one that fits, a last resort where nothing else does."""
    proposed, _ = proposals(question)
    known: list[Option] = []
    for resort in sorted({each.last_resort for each in proposed}):
        group = [each for each in proposed if each.last_resort == resort]
        engines = hopeful(pool, sample, question, group).engines
        found, _ = explore(pool, sample, [each for each in group if each in engines or each.base in engines])
        waiting, _ = swapped(pool, sample, question, evidence, group, [*known, *found])
        options = [*found, *waiting]
        known += options
        for _ in range(MOST_RUN):
            best = _preferred(question, options, evidence)
            if best is None:
                break
            ran = as_they_ran(device, sample, question, evidence, [best])
            if ran and ran[0].verdict == "FITS":
                return ran[0]
    return None


def _preferred(question: Question, options: Sequence[Option], evidence: Evidence) -> Candidate | None:
    """Of all that is predicted to fit."""
    found = [
        each
        for option in options
        for each in fitting(question, option, capacity(question, option.proposal, evidence), evidence)
    ]
    return preferred(found)[0] if found else None


def _more_host(question: Question, smallest: Choice) -> list[Choice]:
    """`smallest` as it stands, where it is the host alone that has too little."""
    if smallest.headroom_bytes < 0 or not question.short_of_host(smallest.host_bytes):
        return []
    return [smallest.model_copy(update={"verdict": "FITS", "reason": _host(question, smallest)})]


def _host(question: Question, smallest: Choice) -> str:
    return f"{gib(smallest.host_bytes)} of host RAM a machine, instead of {gib(question.host_memory_bytes)}"


def _larger_card(question: Question, smallest: Choice, step_on: Callable[[Gpu], StepTime]) -> list[Choice]:
    """The smallest card of the catalogue on which `smallest` would fit as it stands, in a machine of as much memory as
    that takes."""
    needed = smallest.process.high_bytes
    if needed <= question.gpu.usable_bytes:
        return []
    larger = [
        card
        for card in (each.reserving() for each in gpus.gpus())
        if card.usable_bytes >= needed * (1 + UNLIKE) and card.tflops.computes(smallest.strategy.precision)
    ]
    if not larger:
        return []
    card = min(larger, key=lambda each: each.usable_bytes)
    step, samples = step_on(card), smallest.strategy.micro_batch_size * smallest.strategy.grad_accum_steps
    short = question.short_of_host(smallest.host_bytes)
    return [
        smallest.model_copy(
            update={
                "title": f"{smallest.title}, on {card.title}",
                "verdict": "FITS",
                "confirmed": False,
                "ran": False,
                "step": step,
                "samples_per_second_per_card": step.seconds.per(samples),
                "headroom_bytes": card.usable_bytes - needed,
                "reason": f"a larger card, and {_host(question, smallest)}" if short else "a larger card",
            }
        )
    ]
