"""What a page may be asked further: the sizes of each setting that ran."""

from __future__ import annotations

from collections.abc import Sequence

from bigdit.catalog.gpus import gpus
from bigdit.memory import Category
from bigdit.search.finding.candidates import Option, Planner, candidate, micro_batch_sizes
from bigdit.search.finding.confirm import Confirmed, Ran
from bigdit.search.plan import Choice, Point, Room, Setting, alike
from bigdit.search.telling.choices import as_ran
from bigdit.search.telling.curves import Runs
from bigdit.speed.launches import launches_of


def settings(
    planner: Planner, options: Sequence[Option], best: Confirmed, rows: Sequence[Choice], runs: Runs
) -> tuple[Setting, ...]:
    """The options of which any size ran: `rows`, and the `runs` of the best one, which alone has categories."""
    own = best.candidate.option
    known = {row.title: row for row in [*_choices(planner, own, runs), *rows]}
    found = []
    for option in options:
        strategy = option.proposal.strategy
        points = {
            (row.strategy.micro_batch_size, _blocks(option, row)): row
            for row in known.values()
            if alike(strategy, row.strategy)
        }
        if points:
            ran = tuple(_point(planner, best, row, blocks) for (_, blocks), row in sorted(points.items()))
            title, around = option.proposal.title, planner.non_torch(strategy)
            found.append(Setting(title=title, strategy=strategy, non_torch=around, rooms=rooms(planner), points=ran))
    return tuple(found)


def _choices(planner: Planner, own: Option, runs: Runs) -> list[Choice]:
    allowed = {*micro_batch_sizes(planner.question, own.proposal.strategy)}  # runs go on beyond a global batch
    found = []
    for blocks, attempts in runs.items():
        for size, attempt in attempts.items():
            if size in allowed:
                place = candidate(planner, own, size, blocks)
                phases = {phase: each.peak_bytes for phase, each in attempt.phases.items()}
                micro_batches = planner.request(place.strategy).strategy.grad_accum_steps
                launches = launches_of(attempt.launched, micro_batches)
                reserved = attempt.peak_reserved_bytes
                found.append(as_ran(planner, Ran(place, "FITS", reserved, reserved, phases, launches)))
    return found


def _blocks(option: Option, row: Choice) -> int:
    blocks = row.strategy.checkpointed_blocks
    return option.arrangement.count if blocks == "all" else blocks


def _point(planner: Planner, best: Confirmed, row: Choice, blocks: int) -> Point:
    recorded = row.strategy == best.candidate.strategy
    at_peak: dict[Category, int] = best.answer.ledger.at_peak if recorded else {}
    short = planner.question.short_of_host(row.host_bytes)
    return Point(
        micro_batch_size=row.strategy.micro_batch_size,
        checkpointed_blocks=blocks,
        phase=max(row.phases, key=lambda phase: row.phases[phase]),
        at_peak=at_peak,
        peak_allocated_bytes=row.peak_allocated_bytes,
        peak_reserved_bytes=row.peak_reserved_bytes,
        process=row.process,
        host_bytes=row.host_bytes,
        verdict="DOES NOT FIT" if short else row.verdict,
        samples_per_second_per_card=row.samples_per_second_per_card,
    )


def rooms(planner: Planner) -> tuple[Room, ...]:
    """The question's GPU, and those that run the same kernels with the same workspace, beside a context as large."""
    own = planner.question.gpu
    alike = (
        gpu.reserving()
        for gpu in gpus()
        if (gpu.compute_capability, gpu.multiprocessors) == (own.compute_capability, own.multiprocessors)
        and gpu.name != own.name
    )
    return tuple(Room(card=gpu.title, usable_bytes=gpu.usable_bytes) for gpu in (own, *alike))
