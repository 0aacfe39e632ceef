"""The referee: a rehearsal and two steps on an emulated card, of one question, held against each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from bigdit import catalog
from bigdit.bench.against_card import Against, Reserved, against
from bigdit.catalog import Gpu
from bigdit.errors import UserError
from bigdit.memory.caching import OutOfMemory
from bigdit.rehearse.card.client import Card
from bigdit.profile.measured.ranks import run_ranks
from bigdit.profile.lanes import WorkerError
from bigdit.rehearse.pool import Pool
from bigdit.profile.request import StepRequest


class Asks(Protocol):
    """A row of the referee's: a question, and the card of the catalogue that it is asked of.

    With `ranks`, all processes of the strategy run, on a card each; else the first of them alone.
    """

    gpu: str
    ranks: bool

    def question(self) -> tuple[StepRequest, Gpu]:
        """What both sides are asked. Raises UserError for what the catalogue does not know, or cannot be rehearsed."""
        ...


Row = TypeVar("Row", bound=Asks)


def judge(
    rows: Sequence[Row], *, expandable_segments: bool = False, timeout_s: float = 300.0
) -> Iterator[tuple[Row, Against | str]]:
    """Each row with its comparison, or with why there is none; by cards, each of which is started once. On both sides
    the allocator is torch's default, or has expandable segments."""
    with Pool(1, timeout_s=timeout_s) as pool, ThreadPoolExecutor(1) as aside:
        for gpu in dict.fromkeys(row.gpu for row in rows):
            with Card(catalog.resolve_gpu(gpu), expandable_segments=expandable_segments) as card:
                for row in (row for row in rows if row.gpu == gpu):
                    yield row, _judged(row, card, pool, aside, timeout_s, expandable_segments)


def _judged(
    row: Asks, card: Card, pool: Pool, aside: ThreadPoolExecutor, timeout_s: float, expandable_segments: bool
) -> Against | str:
    try:
        request, gpu = row.question()
        rehearsal = aside.submit(pool.rehearse, [request])
        try:
            run = (
                run_ranks(gpu, request, timeout_s, expandable_segments=expandable_segments)
                if row.ranks
                else card.run(request, timeout_s)
            )
        finally:
            (rehearsed,) = rehearsal.result()
        if isinstance(rehearsed, UserError):
            return f"rehearsal: {rehearsed}"
        counters = [
            Reserved(allocated_bytes=phase.peak_allocated_bytes, reserved_bytes=phase.peak_reserved_bytes)
            for phase in run.phases
        ]
        return against(
            rehearsed.timeline, run.timeline, counters, gpu.usable_bytes, expandable_segments=expandable_segments
        )
    except (UserError, WorkerError, OutOfMemory, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def lines(found: Against, most: int = 12) -> Iterable[str]:
    """The phases of one comparison side by side, and the largest differences of each by operator."""
    for at, phase in enumerate(found.phases):
        yield (
            f"{phase.phase:9} allocated {phase.rehearsed_allocated_bytes:15,} {phase.card_allocated_bytes:15,} "
            f"{phase.allocated_difference:12,}   reserved {phase.rehearsed_reserved_bytes:15,} "
            f"{phase.card_reserved_bytes:15,} {phase.reserved_difference:12,}"
        )
        for at_peak in (True, False):
            here = [each for each in found.differences if each.span == at and each.at_peak == at_peak]
            for each in sorted(here, key=lambda each: -each.nbytes * each.count)[:most]:
                when = "at peak " if at_peak else "only in "
                yield f"    {when} {each.side:9} {each.count:4} x {each.nbytes:13,}  {each.operator}"
