"""Candidates as they are shown: with what they take, how fast they go, and why they are listed."""

from __future__ import annotations

from collections.abc import Sequence

from bigdit.catalog import Gpu
from bigdit.search.finding.candidates import (
    SAME_SPEED,
    Candidate,
    Option,
    beside,
    candidate,
    fitting,
    host_bytes,
    largest_micro_batch,
    micro_batch_sizes,
)
from bigdit.profile.cards import NO_CARDS, Device
from bigdit.search.finding.confirm import Confirmed, run
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.space import lossy_by
from bigdit.search.finding.verdict import expected, process
from bigdit.search.plan import Choice, Verdict
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Question
from bigdit.speed.interval import Interval
from bigdit.speed.seconds import StepTime
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of
from bigdit.units import gib

MOST_ROWS = 12

NONE = 0.005
"""A share that would be printed as 0 %."""


def predicted(question: Question, found: Candidate, evidence: Evidence) -> Choice:
    """The choice as the anchors predict it."""
    strategy = found.strategy
    peaks = found.option.arrangement.peaks(found.micro_batch_size, found.blocks)
    allocated = round(max(peaks.values()))
    reserved = max(round(found.reserved_bytes), allocated)
    taken = process(reserved, beside(question, strategy), evidence.band)
    return Choice(
        title=title(found),
        strategy=strategy,
        confirmed=False,
        phases={phase: round(max(peak, 0.0)) for phase, peak in peaks.items()},
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        process=taken,
        verdict=expected(taken, question.gpu.usable_bytes),
        headroom_bytes=question.gpu.usable_bytes - taken.high_bytes,
        host_bytes=host_bytes(question, found.option, found.micro_batch_size, found.blocks),
        step=found.step,
        samples_per_second_per_card=found.rate,
        lossless=found.option.proposal.lossless,
        reason="",
    )


def confirmed(question: Question, found: Confirmed, evidence: Evidence) -> Choice:
    """The choice as it was rehearsed."""
    strategy, ledger = found.candidate.strategy, found.answer.ledger
    work, calibration = work_of(found.timeline, strategy), evidence.calibration(strategy)
    step = step_time(work, strategy, question.gpu, question.cluster, calibration, found.launches)
    return Choice(
        title=title(found.candidate),
        strategy=strategy,
        confirmed=True,
        ran=found.ran,
        phases={phase.phase: phase.peak_bytes for phase in ledger.phases},
        peak_allocated_bytes=ledger.peak_allocated_bytes,
        peak_reserved_bytes=found.reserved_bytes,
        process=found.process,
        verdict=found.verdict,
        headroom_bytes=question.gpu.usable_bytes - found.process.high_bytes,
        host_bytes=found.host.node_bytes,
        step=step,
        samples_per_second_per_card=step.seconds.per(strategy.micro_batch_size * strategy.grad_accum_steps),
        lossless=found.candidate.option.proposal.lossless,
        reason="",
    )


def step_on(question: Question, found: Confirmed, card: Gpu) -> StepTime:
    """The step of the same kernels on other cards, of which no receipt tells."""
    strategy = found.candidate.strategy
    return step_time(work_of(found.timeline, strategy), strategy, card, question.cluster, launches=found.launches)


def title(found: Candidate) -> str:
    """`ZeRO-2 on 8, AdamW, micro-batch 6, 4 of 20 blocks recomputed`."""
    count = found.option.arrangement.count
    blocks = {0: "nothing recomputed", count: "all blocks recomputed"}.get(
        found.blocks, f"{found.blocks} of {count} blocks recomputed"
    )
    return f"{found.option.proposal.title}, micro-batch {found.micro_batch_size}, {blocks}"


def front(
    sample: Sample,
    question: Question,
    options: Sequence[Option],
    known: Sequence[Choice],
    capacities: Sequence[float],
    evidence: Evidence,
    device: Device = NO_CARDS,
) -> tuple[Choice, ...]:
    """The Pareto front of memory against speed, among the choices `known` and what else fits: first of what keeps an
    optimizer's numbers as the recommended one does, then of the others where none of those is as good; MOST_ROWS at
    most; and the fastest that the recommended one was chosen from, and of each base of adapters that has no row yet.

    `known` come in where they are on it or not; the first of them is the recommended one. The others run on the
    device, and those that do not fit there are left out.
    """
    spread = (
        each
        for option, capacity in zip(options, capacities, strict=True)
        for each in _spread(question, option, capacity, evidence)
    )
    more = {title(each): each for each in spread}
    titles, lossless = {choice.title for choice in known}, known[0].lossless
    every = [*known, *(predicted(question, each, evidence) for name, each in more.items() if name not in titles)]
    alike = [choice for choice in every if choice.lossless == lossless]
    own = [choice for choice in _frontier(alike) if choice.title not in titles]
    others = [choice for choice in _frontier(every) if choice.title not in titles and choice.lossless != lossless]
    room = MOST_ROWS - len(known)
    shown = _thinned(own, max(room - len(others), room - room // 2))
    shown += _thinned(others, room - len(shown))
    fastest = _fastest_first(alike)[0]
    if fastest.title not in {*titles, *(choice.title for choice in shown)}:
        shown.append(fastest)
    bases = {_base(choice) for choice in (*known, *shown)}
    shown += [choice for choice in _fastest_of_each_base(every) if _base(choice) not in bases]
    unknown = [more[choice.title] for choice in _fastest_first(shown)]
    rows = _fastest_first([*known, *as_they_ran(device, sample, question, evidence, unknown)])
    rows.sort(key=lambda choice: choice.lossless != lossless)
    return tuple(
        choice.model_copy(
            update={"reason": recommended(choice, every) if choice is known[0] else _reason(choice, known[0])}
        )
        for choice in rows
    )


def _frontier(choices: Sequence[Choice]) -> list[Choice]:
    """Those of which no other one takes less and is as fast; what takes least first."""
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.process.high_bytes, -each.samples_per_second_per_card.middle)):
        if not best or choice.samples_per_second_per_card.middle > best[-1].samples_per_second_per_card.middle:
            best.append(choice)
    return best


def _base(choice: Choice) -> str | None:
    return None if choice.strategy.lora is None else choice.strategy.lora.base


def _fastest_of_each_base(choices: Sequence[Choice]) -> list[Choice]:
    """nf4 takes less than int8 and is as fast, so that no front has an int8 base, whose error is a tenth."""
    return list({_base(choice): choice for choice in reversed(_fastest_first(choices))}.values())


def _fastest_first(rows: Sequence[Choice]) -> list[Choice]:
    return sorted(rows, key=lambda each: -each.samples_per_second_per_card.middle)


def as_they_ran(
    device: Device, sample: Sample, question: Question, evidence: Evidence, candidates: Sequence[Candidate]
) -> list[Choice]:
    """The candidates as they ran on cards, without those that do not fit there; as they are predicted where there are
    no cards, and where an attempt could not be run."""
    choices = [predicted(question, each, evidence) for each in candidates]
    found = []
    answers = run(device, sample, question, evidence.band, candidates)
    for choice, each, ran in zip(choices, candidates, answers, strict=True):
        if ran is None:
            found.append(choice)
        elif ran.reserved_bytes is not None:
            work, calibration = each.option.arrangement.work(each.micro_batch_size, each.blocks), evidence.calibration
            step = step_time(
                work, choice.strategy, question.gpu, question.cluster, calibration(choice.strategy), ran.launches
            )
            images = choice.strategy.micro_batch_size * choice.strategy.grad_accum_steps
            update = {"step": step, "samples_per_second_per_card": step.seconds.per(images)}
            as_it_ran = as_run(question, choice, ran.reserved_bytes, ran.verdict, evidence)
            found.append(as_it_ran.model_copy(update=update))
    return found


def as_run(question: Question, choice: Choice, reserved_bytes: int, verdict: Verdict, evidence: Evidence) -> Choice:
    """The predicted choice as it ran on an emulated card."""
    taken = process(reserved_bytes, beside(question, choice.strategy), evidence.band)
    update = {
        "ran": True,
        "peak_reserved_bytes": reserved_bytes,
        "process": taken,
        "verdict": verdict,
        "headroom_bytes": question.gpu.usable_bytes - taken.high_bytes,
    }
    return choice.model_copy(update=update)


def _spread(question: Question, option: Option, capacity: float, evidence: Evidence) -> list[Candidate]:
    """The option with none to all blocks recomputed in quarters, at micro-batches up to the largest; and the fastest of
    those that the recommended one was chosen from, which has as few recomputed as fit."""
    count, pinned = option.arrangement.count, question.pins.checkpointed_blocks
    steps = option.quarters if pinned is None else [count if pinned == "all" else pinned]
    sizes = list(micro_batch_sizes(question, option.proposal.strategy))
    found = []
    for blocks in steps:
        most = largest_micro_batch(option, blocks, capacity)
        small = [size for size in sizes if size <= most]
        chosen = {*small[:1], *small[-1:], *(size for size in small if size & (size - 1) == 0)}
        on_host = [size for size in sorted(chosen) if _host_suffices(question, option, size, blocks)]
        found += [candidate(question, option, size, blocks, evidence) for size in on_host]
    fastest = max(fitting(question, option, capacity, evidence), key=lambda each: each.rate.middle, default=None)
    return found if fastest is None else [*found, fastest]


def _host_suffices(question: Question, option: Option, micro_batch_size: int, blocks: int) -> bool:
    return host_bytes(question, option, micro_batch_size, blocks) <= question.host_memory_bytes


def _thinned(rows: Sequence[Choice], most: int) -> list[Choice]:
    """At most so many of the rows, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    if most < 2:
        return list(rows[:most])
    return [rows[round(at * (len(rows) - 1) / (most - 1))] for at in range(most)]


def faster_or_slower(rate: Interval, other: Interval) -> str:
    """How much faster it is, by the middles; or how much slower where the intervals say so most, which is what tells
    strategies apart."""
    middle, worst = rate.middle / other.middle - 1, min(rate.low / other.low, rate.high / other.high) - 1
    if middle >= NONE:
        return f"{middle:.0%} faster"
    if worst > -NONE:
        return "as fast"
    return f"{'up to ' if middle - worst >= NONE else ''}{-worst:.0%} slower"


def recommended(choice: Choice, rows: Sequence[Choice]) -> str:
    """Why `choice` is the recommended one among `rows`."""
    if choice.verdict == "DOES NOT FIT":
        return "what takes least of what was asked for"
    if choice.verdict == "TIGHT":
        return "nothing of what was asked for is sure to fit, and of what may this is preferred"
    fits = [each for each in rows if each.verdict == "FITS"]
    swaps = bool(choice.strategy.blocks_to_swap)
    numbers = [each for each in fits if each.lossless == choice.lossless]
    alike = [each for each in numbers if bool(each.strategy.blocks_to_swap) == swaps]
    fastest, of_numbers, of_all = (
        max([choice, *among], key=lambda each: each.samples_per_second_per_card.middle)
        for among in (alike, numbers, fits)
    )
    among = "" if of_all in (of_numbers, choice) else " lossless one"
    among += " that fits" + ("" if of_numbers in (fastest, choice) or swaps else " with all weights on the card")
    if fastest is choice:
        return f"recommended: the fastest{among}"
    return f"recommended: as fast as any{among}, to {SAME_SPEED:.0%}, and of those the one that takes least"


def _reason(choice: Choice, recommended: Choice) -> str:
    less = recommended.process.high_bytes - choice.process.high_bytes
    parts = [faster_or_slower(choice.samples_per_second_per_card, recommended.samples_per_second_per_card)]
    parts.append(f"{gib(abs(less))} {'less' if less >= 0 else 'more'}")
    if recommended.lossless:
        parts += lossy_by(choice.strategy)
    if choice.verdict != "FITS":
        parts.append(choice.verdict.lower())
    return "; ".join(parts)
