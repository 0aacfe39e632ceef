"""What receipts of a GPU say about predictions for it; without any, what is assumed in their place."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveInt

from bigdit.catalog import Gpu
from bigdit.errors import UserError
from bigdit.profile.attempt import StepRequest
from bigdit.profile.cards import Cards
from bigdit.profile.pool import WorkerError
from bigdit.receipt import Receipt
from bigdit.search.plan import Band
from bigdit.speed.seconds import Calibration, Cluster, StepTime
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of
from bigdit.strategy import Strategy, Strict

UNPROVED = Band(share=0.003, source="emulated GPUs have been this far below real ones, at most")
"""Where no receipt of the GPU says more. Emulated GPUs are below an A100 by 0.02 % at most in seventeen configurations
of cogvideox-factory's own scripts (benchmarks/peers.md, which tells of an eighteenth, whose blocks addresses decide in
torch's default allocator). Of bigdit's own steps, with expandable segments, a real H100 reserved what the emulated one
did to the byte, but for a mixture of experts (benchmarks/gpu_matrix.md).

cuDNN's workspaces that an emulated GPU does not know are not in it: torch takes the next algorithm where one of them is
too much for the GPU. Source: try_configs in aten/src/ATen/native/cudnn/Conv_v8.cpp, torch 2.13, which catches
OutOfMemoryError.
"""

UNPROVED_ROUTED = Band(
    share=0.029, source="a real H100 took so much more than an emulated one where values choose the experts"
)
"""The same of a mixture of experts: nothing without values knows how many tokens each expert has. HiDream-I1 of two
blocks allocated 2.9 % more on an H100 than on an emulated one, and reserved 1.0 % more (benchmarks/gpu_matrix.md)."""


@dataclass(frozen=True)
class Checked:
    """A receipt beside what is predicted for it: seconds of a step, and the reserved peak in bytes, with the allocator
    as it was set in that run."""

    receipt: Receipt
    step: StepTime
    peak_reserved_bytes: int


@dataclass(frozen=True)
class Evidence:
    """Receipts of the GPU beside their predictions; and whether the model's tokens are `routed` to experts."""

    checked: tuple[Checked, ...] = ()
    routed: bool = False

    @property
    def band(self) -> Band:
        """How far off the reserved peak may be."""
        known = memory_band(self.checked) or UNPROVED
        # receipts of other models say nothing of experts
        return max(known, UNPROVED_ROUTED, key=lambda band: band.share) if self.routed else known

    def calibration(self, strategy: Strategy) -> Calibration | None:
        """What was measured of steps like this strategy's; None where nothing was."""
        return calibration(self.checked, strategy)

    def source(self, strategy: Strategy) -> str:
        """Where the seconds come from, in a sentence."""
        found = self.calibration(strategy)
        unknown = "a roofline with published efficiencies; no receipt of this GPU calibrates it"
        return unknown if found is None else found.source


class Learnt(Strict):
    """What plans of a GPU take from its receipts: by which share of the reserved peak it may be off, and for each kind
    of strategy what its seconds are multiplied by. None and empty where nothing was measured."""

    gpu: str
    receipts: PositiveInt
    band_share: NonNegativeFloat | None
    band_source: str | None
    speeds: dict[str, Calibration]


def check(receipts: Iterable[Receipt], gpu: Gpu, cards: Cards) -> tuple[list[Checked], list[str]]:
    """Run what each receipt was asked for on emulated `cards`, and predict it; a line for each that cannot be.

    A receipt of torch's default allocator has another reserved peak, which is run with it.
    """
    checked, notices = [], []
    for each in receipts:
        left_out = f"the receipt of {each.model.name}, {each.written}, is left out"
        if each.strategy.compile_blocks:
            notices.append(f"{left_out}: its blocks were compiled")
            continue
        try:
            checked.append(_checked(each, gpu, cards))
        except (UserError, WorkerError) as error:
            notices.append(f"{left_out}: {str(error).splitlines()[0]}")
    return checked, notices


def _checked(each: Receipt, gpu: Gpu, cards: Cards) -> Checked:
    request = StepRequest(model=each.model, batch=each.batch, strategy=each.strategy, objective=each.objective)
    attempt = cards.attempt(request, counted=True)
    reserved = attempt.peak_reserved_bytes
    if not each.expandable_segments:
        with Cards(gpu, 1, expandable_segments=False) as others:
            reserved = others.attempt(request).peak_reserved_bytes
    cluster = Cluster(gpus=each.strategy.world_size, gpus_per_node=each.gpus_per_node)
    return Checked(each, step_time(work_of(attempt.work, each.strategy), each.strategy, gpu, cluster), reserved)


def calibration(checked: Iterable[Checked], strategy: Strategy) -> Calibration | None:
    """What the receipts of strategies like this one say about its time; None where there are none.

    Like: on one GPU or on several, with the optimizer on the GPU or on the host, since different links decide. Those of
    emulated GPUs, which run no kernel, say nothing.
    """
    alike = [each for each in _real(checked) if _kind(each.receipt.strategy) == _kind(strategy)]
    timed = [(each.receipt.seconds_per_step, each.step.seconds.middle) for each in alike]
    ratios = [seconds / predicted for seconds, predicted in timed if seconds is not None]
    if not ratios:
        return None
    median, count = statistics.median(ratios), len(ratios)
    spread = max(abs(math.log(ratio / median)) for ratio in ratios)
    devices = ", ".join(sorted({each.receipt.device for each in alike}))
    seen = f"{count} receipt{'s' * (count > 1)} of {devices}, {_kind(strategy)}"
    apart = f", to {math.expm1(spread):.0%} either way" if count > 1 else ", once"
    source = f"{seen}: steps took {median:.2f} times the middle of the roofline{apart}"
    return Calibration(ratio=median, spread=spread, count=count, source=source)


def memory_band(checked: Iterable[Checked]) -> Band | None:
    """How far off the reserved peak may be; None without measurements.

    The largest error that n receipts show is exceeded by the next with probability 1 / (n + 1); (n + 1) / n of it
    is what the largest error is where errors are spread evenly up to it (the estimator of a uniform distribution's
    bound that has no bias). What is assumed without any counts as one beside them, as it does in Calibration: a single
    one that is met to the byte proves little. Those of emulated GPUs do not count: how far real ones are from these is
    what is asked.
    """
    measured = [(each.receipt.measured_peak_reserved_bytes, each.peak_reserved_bytes) for each in _real(checked)]
    errors = [abs(found / predicted - 1) for found, predicted in measured if found is not None]
    if not errors:
        return None
    count = len(errors)
    share = min(max(errors) * (count + 1) / count + UNPROVED.share / (count + 1), 0.99)
    seen = f"{count} receipt{'s' * (count > 1)} of this GPU, off by {max(errors):.1%} at most"
    return Band(
        share=share, source=f"{seen}, and 1/{count + 1} of the {UNPROVED.share:.1%} that is assumed without any"
    )


def learnt(gpu: Gpu, checked: list[Checked]) -> Learnt:
    """All that these receipts say to plans of `gpu`, kind by kind of strategy."""
    band = memory_band(checked)
    kinds = {_kind(each.receipt.strategy): each.receipt.strategy for each in checked}
    speeds = {kind: calibration(checked, strategy) for kind, strategy in sorted(kinds.items())}
    return Learnt(
        gpu=gpu.name,
        receipts=len(checked),
        band_share=None if band is None else band.share,
        band_source=None if band is None else band.source,
        speeds={kind: speed for kind, speed in speeds.items() if speed is not None},
    )


def _real(checked: Iterable[Checked]) -> list[Checked]:
    return [each for each in checked if not each.receipt.emulated]


def _kind(strategy: Strategy) -> str:
    cards = "one GPU" if strategy.world_size == 1 else "several GPUs"
    zero = (strategy.ds_config or {}).get("zero_optimization", {})
    optimizer = zero.get("offload_optimizer") or {}
    offload = strategy.cpu_offload or optimizer.get("device", "none") != "none"
    return f"{cards}, optimizer on the host" if offload else cards
