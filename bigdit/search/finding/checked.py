"""Receipts of a card, rehearsed again and held against what is predicted for them now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveInt

from bigdit.catalog import Gpu
from bigdit.errors import UserError
from bigdit.memory.footprint import footprint
from bigdit.memory.process import beside_training
from bigdit.receipt import Receipt
from bigdit.rehearse import WorkerError, StepRequest, RehearsedSize
from bigdit.profile.request import device_bytes
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.unproved import UNPROVED
from bigdit.spec import Strategy, Strict
from bigdit.speed.calibration import Calibration, calibration_of
from bigdit.speed.cluster import Cluster
from bigdit.speed.seconds import StepTime
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of

Rehearse = Callable[[StepRequest], RehearsedSize]


@dataclass(frozen=True)
class Checked:
    """A receipt beside what is predicted for it: seconds of a step, and the reserved peak in bytes, by the allocator as
    it was set in that run."""

    receipt: Receipt
    step: StepTime
    peak_reserved_bytes: int


class Learnt(Strict):
    """What plans of a card take from its receipts: by which share of the reserved peak it may be off, and for each kind
    of strategy what its seconds are multiplied by. None and empty where nothing was measured."""

    gpu: str
    receipts: PositiveInt
    band_share: NonNegativeFloat | None
    band_source: str | None
    speeds: dict[str, Calibration]


def check(receipts: Iterable[Receipt], card: Gpu, rehearse: Rehearse) -> tuple[list[Checked], list[str]]:
    """Rehearse what each receipt was asked for on `card`, and predict it; a line for each that cannot be."""
    checked, notices = [], []
    for each in receipts:
        if each.strategy.compile_blocks:
            notices.append(f"the receipt of {each.model.name}, {each.written}, is left out: its blocks were compiled")
            continue
        try:
            size = rehearse(_request(each, card))
        except (UserError, WorkerError) as error:
            problem = str(error).splitlines()[0]
            notices.append(f"the receipt of {each.model.name}, {each.written}, is left out: {problem}")
            continue
        timeline, cluster = size.timeline, Cluster(gpus=each.strategy.world_size, gpus_per_node=each.gpus_per_node)
        step = step_time(work_of(timeline, each.strategy), each.strategy, card, cluster)
        beside = beside_training(each.strategy, card.compute_capability, card.multiprocessors)
        taken = footprint(timeline, card.usable_bytes, beside)
        way = taken.expandable_segments if each.expandable_segments else taken.segments
        checked.append(Checked(each, step, way.wanted_bytes))
    return checked, notices


def one_by(pool: Pool) -> Rehearse:
    """Rehearsals one after another, by the workers of a pool that stays. They raise UserError and WorkerError."""

    def rehearse(request: StepRequest) -> RehearsedSize:
        (answer,) = pool.rehearse([request])
        if isinstance(answer, UserError):
            raise answer
        return answer

    return rehearse


def calibration(checked: Iterable[Checked], strategy: Strategy) -> Calibration | None:
    """What the receipts of strategies like this one say about its time; None where there are none.

    Like: on one card or on several, with the optimizer on the card or on the host, since different links decide.
    Those of emulated cards, which run no kernel, say nothing.
    """
    alike = [each for each in _real(checked) if _kind(each.receipt.strategy) == _kind(strategy)]
    timed = [(each.receipt.seconds_per_step, each) for each in alike]
    ratios = [seconds / each.step.seconds.middle for seconds, each in timed if seconds is not None]
    devices = sorted({each.receipt.device for _, each in timed})
    return calibration_of(ratios, f"{', '.join(devices)}, {_kind(strategy)}")


def memory_band(checked: Iterable[Checked]) -> tuple[float, str] | None:
    """How far off the reserved peak may be, as a share of it, and where that comes from; None without measurements.

    The largest error that n receipts show is exceeded by the next with probability 1 / (n + 1); (n + 1) / n of it
    is what the largest error is where errors are spread evenly up to it (the estimator of a uniform distribution's
    bound that has no bias). What is assumed without any counts as one beside them, as it does in Calibration: a single
    one that is met to the byte proves little. Those of emulated cards do not count: how far real ones are from these is
    what is asked.
    """
    measured = [(each.receipt.measured_peak_reserved_bytes, each.peak_reserved_bytes) for each in _real(checked)]
    errors = [abs(found / predicted - 1) for found, predicted in measured if found is not None]
    if not errors:
        return None
    count = len(errors)
    share = min(max(errors) * (count + 1) / count + UNPROVED.share / (count + 1), 0.99)
    seen = f"{count} receipt{'s' * (count > 1)} of this card, off by {max(errors):.1%} at most"
    return share, f"{seen}, and 1/{count + 1} of the {UNPROVED.share:.1%} that is assumed without any"


def learnt(card: Gpu, checked: Sequence[Checked]) -> Learnt:
    """All that these receipts say to plans of `card`, kind by kind of strategy."""
    band = memory_band(checked)
    kinds = {_kind(each.receipt.strategy): each.receipt.strategy for each in checked}
    speeds = {kind: calibration(checked, strategy) for kind, strategy in sorted(kinds.items())}
    return Learnt(
        gpu=card.name,
        receipts=len(checked),
        band_share=None if band is None else band[0],
        band_source=None if band is None else band[1],
        speeds={kind: speed for kind, speed in speeds.items() if speed is not None},
    )


def _real(checked: Iterable[Checked]) -> list[Checked]:
    return [each for each in checked if not each.receipt.emulated]


def _request(each: Receipt, card: Gpu) -> StepRequest:
    return StepRequest(
        model=each.model,
        batch=each.batch,
        strategy=each.strategy,
        micro_batch_sizes=(each.strategy.micro_batch_size,),
        objective=each.objective,
        compute_capability=card.compute_capability,
        multiprocessors=card.multiprocessors,
        device_bytes=device_bytes(card, each.strategy),
    )


def _kind(strategy: Strategy) -> str:
    cards = "one card" if strategy.world_size == 1 else "several cards"
    zero = (strategy.ds_config or {}).get("zero_optimization", {})
    optimizer = zero.get("offload_optimizer") or {}
    offload = strategy.cpu_offload or optimizer.get("device", "none") != "none"
    return f"{cards}, state on the host" if offload else cards
