"""Calibration of plans by receipts of the same GPU; and what is assumed without receipts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from bigdit import receipt
from bigdit.catalog import Gpu, gpu
from bigdit.documents import read_json
from bigdit.errors import UserError
from bigdit.processes import ROOT, in_checkout
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.pool import WorkerError
from bigdit.receipt import Receipt
from bigdit.search.plan import Margin
from bigdit.speed.seconds import Cluster, StepRatio, StepTime
from bigdit.strategy import Strategy

NEWEST = 8
"""Most receipts of a GPU that are used: each runs on an emulated GPU, which takes a second if it is not cached."""

UNPROVED = Margin(share=0.003, source="emulated GPUs have been this far below real ones, at most")
"""The margin without receipts of the GPU. Emulated GPUs were at most 0.02 % below an A100 in seventeen of eighteen
configurations of cogvideox-factory's own scripts (benchmarks/peers.md). For bigdit's own steps, a real H100 reserved
the same bytes as the emulated one, except for a mixture of experts (benchmarks/gpu_matrix.md).

cuDNN workspaces that an emulated GPU does not know are not in the margin: if one does not fit the GPU, torch takes the
next algorithm. Source: try_configs in aten/src/ATen/native/cudnn/Conv_v8.cpp, torch 2.13, catches OutOfMemoryError.
"""

UNPROVED_ROUTED = Margin(
    share=0.004, source="a real H100 took nearly so much more than an emulated one for a mixture of experts"
)
"""The same for a mixture of experts, whose router spreads tokens evenly on an emulated GPU. HiDream-I1 of two blocks
with random weights reserved 0.33 % more on an H100, and allocated as much more (benchmarks/gpu_matrix.md)."""


def folders(asked: Path | None = None) -> list[Path]:
    """Folders with receipts: the `asked` one; else the user's, and the repository's if bigdit runs in it."""
    if asked is not None:
        return [asked]
    return [*([ROOT / "benchmarks" / "receipts"] if in_checkout() else []), receipt.folder()]


def read(places: Iterable[Path]) -> tuple[list[Receipt], list[str]]:
    """All receipts of these folders, oldest first, and a line for each file that is no receipt."""
    found, notices = [], []
    for path in sorted({path for place in places for path in place.glob("*.json")}):
        try:
            document = read_json(path)
            if not isinstance(document, dict):
                raise ValueError("no mapping of keys, such as model and strategy")
            found.append(Receipt.model_validate(document))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"]) or "the file"
            notices.append(f"{path} is no receipt and was ignored: {at}: {first['msg']}")
        except ValueError as error:
            notices.append(f"{path} is no receipt and was ignored: it is {error}")
        except OSError as error:
            notices.append(f"{path} cannot be read and was ignored: {error.strerror or error}")
    return sorted(found, key=lambda each: each.written), notices


def of_gpu(receipts: Iterable[Receipt], asked: Gpu, *, emulated: bool = False) -> list[Receipt]:
    """The newest receipts of this GPU, or of emulated ones of its kind, with one bucket."""
    alike = [each for each in receipts if each.emulated == emulated and each.buckets == 1]
    return [each for each in alike if _is(each.device, asked)][-NEWEST:]


def left_out(receipts: Iterable[Receipt], asked: Gpu) -> list[str]:
    """A line if there are receipts of emulated GPUs of this kind, which plans ignore."""
    if (count := sum(each.emulated and _is(each.device, asked) for each in receipts)) == 0:
        return []
    return [f"{count} receipt{'s' * (count > 1)} left out, made on emulated GPUs: plans learn from real ones alone"]


def own_receipts(asked: Gpu, folder: Path | None) -> tuple[list[Receipt], list[str]]:
    """The receipts of the GPU in the folder, or in the usual folders; and lines for what was ignored."""
    found, notices = read(folders(folder))
    return of_gpu(found, asked), [*notices, *left_out(found, asked)]


def _is(device: str, asked: Gpu) -> bool:
    try:
        return gpu(device).name == asked.name
    except UserError:
        return False


@dataclass(frozen=True)
class Checked:
    """A receipt and its prediction: the seconds of a step, and the reserved peak with that run's allocator setting."""

    receipt: Receipt
    step: StepTime
    peak_reserved_bytes: int


@dataclass(frozen=True)
class Calibration:
    """Receipts of the GPU with their predictions. `routed`: the model is a mixture of experts."""

    checked: Sequence[Checked] = ()
    routed: bool = False

    @property
    def margin(self) -> Margin:
        """The margin of the reserved peak, measured or assumed."""
        known = self.measured_margin or UNPROVED
        # Receipts of other models say nothing about experts.
        return max(known, UNPROVED_ROUTED, key=lambda margin: margin.share) if self.routed else known

    @property
    def measured_margin(self) -> Margin | None:
        """The margin of the reserved peak by receipts; None without measurements.

        The next receipt exceeds the largest of n errors with probability 1 / (n + 1). (n + 1) / n times the largest
        error is the unbiased estimator of a uniform distribution's bound. The assumed margin counts as one more
        receipt, as in StepRatio: one receipt without error proves little.
        """
        measured = [(each.receipt.measured_peak_reserved_bytes, each.peak_reserved_bytes) for each in self._real]
        errors = [abs(found / predicted - 1) for found, predicted in measured if found is not None]
        if not errors:
            return None
        count = len(errors)
        share = min(max(errors) * (count + 1) / count + UNPROVED.share / (count + 1), 0.99)
        found = f"{count} receipt{'s' * (count > 1)} of this GPU, off by {max(errors):.1%} at most"
        assumed = f"1/{count + 1} of the {UNPROVED.share:.1%} that is assumed without any"
        return Margin(share=share, source=f"{found}, and {assumed}")

    def ratio(self, strategy: Strategy) -> StepRatio | None:
        """The ratio of measured to predicted seconds in receipts of similar strategies; None without such receipts.

        Similar: also on one GPU, or on several; also with the optimizer on the GPU, or in CPU memory. Other links limit
        the others.
        """
        alike = [each for each in self._real if _kind(each.receipt.strategy) == _kind(strategy)]
        timed = [(each.receipt.seconds_per_step, each.step.seconds.middle) for each in alike]
        ratios = [seconds / predicted for seconds, predicted in timed if seconds is not None]
        if not ratios:
            return None
        median, count = statistics.median(ratios), len(ratios)
        spread = max(abs(math.log(ratio / median)) for ratio in ratios)
        devices = ", ".join(sorted({each.receipt.device for each in alike}))
        found = f"{count} receipt{'s' * (count > 1)} of {devices}, {_kind(strategy)}"
        apart = f", to {math.expm1(spread):.0%} either way" if count > 1 else ", once"
        source = f"{found}: steps took {median:.2f} times the middle of the roofline{apart}"
        return StepRatio(ratio=median, spread=spread, count=count, source=source)

    def source(self, strategy: Strategy) -> str:
        """The source of the seconds, in a sentence."""
        if found := self.ratio(strategy):
            return found.source
        return "published rates of GPUs; no measured run of this GPU corrects them"

    @property
    def _real(self) -> list[Checked]:
        """Receipts of real GPUs: only they show the error of emulated ones."""
        return [each for each in self.checked if not each.receipt.emulated]


def check(receipts: Iterable[Receipt], gpus: EmulatedGpus) -> tuple[list[Checked], list[str]]:
    """Run the step of each receipt on emulated GPUs, with its allocator setting. Also a line for each failure."""
    checked, notices = [], []
    for each in receipts:
        problem = f"the receipt of {each.model.name}, {each.written}, is left out"
        try:
            checked.append(_checked(each, gpus))
        except (UserError, WorkerError) as error:
            notices.append(f"{problem}: {str(error).splitlines()[0]}")
    return checked, notices


def _checked(each: Receipt, gpus: EmulatedGpus) -> Checked:
    from bigdit.speed.step import step_time  # late: it imports numpy, which a cached plan does not need
    from bigdit.speed.work import work_of

    request = StepRequest(model=each.model, batch=each.batch, strategy=each.strategy, objective=each.objective)
    attempt = gpus.attempt(request, counted="step")
    cluster = Cluster(gpus=each.strategy.world_size, gpus_per_node=each.gpus_per_node)
    step = step_time(work_of(attempt.work, each.strategy), each.strategy, gpus.gpu, cluster)
    if each.expandable_segments:
        return Checked(each, step, attempt.peak_reserved_bytes)
    with EmulatedGpus(gpus.gpu, 1, expandable_segments=False) as default:
        return Checked(each, step, default.attempt(request).peak_reserved_bytes)


def _kind(strategy: Strategy) -> str:
    gpus = "one GPU" if strategy.world_size == 1 else "several GPUs"
    return f"{gpus}, optimizer in CPU memory" if strategy.optimizer_in_cpu_memory else gpus
