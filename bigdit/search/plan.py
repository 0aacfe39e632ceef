"""The plan of the single-GPU step: its memory, rehearsed at two micro-batch sizes, against a card's bytes."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from bigdit.catalog import CatalogModel, Gpu
from bigdit.memory import Ledger
from bigdit.rehearse import rehearse
from bigdit.rehearse.ask import request_for
from bigdit.spec import BatchShape, Strategy, Strict

MICRO_BATCH_SIZES = (1, 2)


class PlannedSize(Strict):
    """The rehearsed ledger of one micro-batch size."""

    micro_batch_size: PositiveInt
    peak_allocated_bytes: NonNegativeInt
    deciding_phase: str
    ledger: Ledger


class Plan(Strict):
    """What the step takes on one card.

    `largest_micro_batch_size` is the largest whose extrapolated peak (`largest_peak_bytes`) stays below the
    card's usable bytes; 0, with the peak at 1, where none does. Phases are affine in the micro-batch size: each
    is continued by its own line through the two rehearsed sizes, and the highest counts.
    """

    model: str
    params: PositiveInt
    gpu: str
    usable_bytes: PositiveInt
    batch: BatchShape
    strategy: Strategy
    sizes: tuple[PlannedSize, ...]
    largest_micro_batch_size: NonNegativeInt
    largest_peak_bytes: NonNegativeInt
    headroom_bytes: int
    versions: dict[str, str]

    @property
    def fits(self) -> bool:
        """Whether a micro-batch of one leaves anything of the card."""
        return self.largest_micro_batch_size > 0


def make_plan(
    model: CatalogModel, gpu: Gpu, strategy: Strategy, *, resolution: int | tuple[int, int] | None = None
) -> Plan:
    """Rehearse the step and hold it against the card. Raises UserError for a model that cannot be rehearsed."""
    asked = request_for(model, gpu, strategy, resolution=resolution)
    request = asked.model_copy(update={"micro_batch_sizes": MICRO_BATCH_SIZES})
    rehearsed = rehearse(request).sizes
    ledgers = (rehearsed[0].ledger, rehearsed[1].ledger)
    largest = largest_micro_batch_size(ledgers, gpu.usable_bytes)
    peak = extrapolated_peak(ledgers, max(largest, 1))
    return Plan(
        model=model.name,
        params=rehearsed[0].params,
        gpu=gpu.name,
        usable_bytes=gpu.usable_bytes,
        batch=request.batch,
        strategy=strategy,
        sizes=tuple(
            PlannedSize(
                micro_batch_size=size.micro_batch_size,
                peak_allocated_bytes=size.ledger.peak_allocated_bytes,
                deciding_phase=size.ledger.deciding.phase,
                ledger=size.ledger,
            )
            for size in rehearsed
        ),
        largest_micro_batch_size=largest,
        largest_peak_bytes=peak,
        headroom_bytes=gpu.usable_bytes - peak,
        versions=rehearsed[0].versions,
    )


def extrapolated_peak(ledgers: tuple[Ledger, Ledger], micro_batch_size: int) -> int:
    """Peak bytes at a micro-batch size, from the ledgers at sizes 1 and 2."""
    one, two = ledgers
    lines = ((phase.peak_bytes, two.phase(phase.phase).peak_bytes) for phase in one.phases)
    return max(at_one + (micro_batch_size - 1) * (at_two - at_one) for at_one, at_two in lines)


def largest_micro_batch_size(ledgers: tuple[Ledger, Ledger], usable_bytes: int) -> int:
    """The largest size whose extrapolated peak is within `usable_bytes`; 0 where there is none."""
    one, two = ledgers
    largest: list[int] = []
    for phase in one.phases:
        at_one, at_two = phase.peak_bytes, two.phase(phase.phase).peak_bytes
        if at_one > usable_bytes:
            return 0
        if at_two > at_one:
            largest.append(1 + (usable_bytes - at_one) // (at_two - at_one))
    return min(largest)
