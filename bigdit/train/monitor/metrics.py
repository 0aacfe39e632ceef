"""The metrics of each step: `metrics.jsonl`, the figures on the terminal, and model FLOPs utilisation (MFU).

MFU: the FLOPs that a model's forward and backward passes need, as a share of the GPU's peak; recomputation does not
count. Source: Chowdhery et al., arXiv:2204.02311, appendix B.
"""

from __future__ import annotations

import itertools
import json
import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text
from torch.utils.flop_counter import FlopCounterMode

from bigdit import log, models
from bigdit.catalog.gpus import named
from bigdit.checkpoint import Peers
from bigdit.config.run import METRICS
from bigdit.errors import UserError
from bigdit.files import write_text
from bigdit.loader.batch import Batch, CaptionedBatch
from bigdit.loader.stream import Micro
from bigdit.models import Family
from bigdit.strategy import ModelSpec, Precision, Strategy
from bigdit.train.monitor.seconds import Collectives, RankSeconds, SlowRanks
from bigdit.train.monitor.trackers import Trackers
from bigdit.train.record import read_metrics
from bigdit.train.step import StepResult
from bigdit.units import gib, how_many

_META = torch.device("meta")


class Mfu:
    """Counts FLOPs once for each shape of a micro-batch, on meta tensors.

    `peak`: FLOPs a second of the GPUs that share a sample.
    """

    def __init__(self, spec: ModelSpec, family: Family, peak: float, *, frozen: bool) -> None:
        """`frozen`: only adapters are trained (LoRA); their FLOPs are not counted."""
        self.peak = peak
        self._family = family
        self._model = models.outline(spec).eval()
        # Gradients of activations cost as much as a forward pass, and so do gradients of weights.
        self._passes = 2 if frozen else 3
        self._known: dict[tuple[torch.Size, ...], int | None] = {}

    def flops(self, micro_batches: Sequence[Micro]) -> int | None:
        """The FLOPs of a step, forward and backward. None for a model that reads values, and with features online."""
        counts = [self._forward(batch) if isinstance(batch, Batch) else None for batch in micro_batches]
        known = [count for count in counts if count is not None]
        return self._passes * sum(known) if len(known) == len(counts) else None

    def _forward(self, batch: Batch) -> int | None:
        shapes = tuple(tensor.shape for tensor in batch.tensors())
        if shapes not in self._known:
            self._known[shapes] = self._counted(batch.to(_META, torch.float32))
        return self._known[shapes]

    @torch.no_grad()
    def _counted(self, batch: Batch) -> int | None:
        with FlopCounterMode(display=False) as counter:
            try:
                self._family.predict(self._model, batch.latents, torch.zeros(len(batch.latents), device=_META), batch)
            except NotImplementedError:  # it reads values, such as a mask's lengths, which meta tensors lack
                return None
        return counter.get_total_flops()


def mfu_of(spec: ModelSpec, family: Family, strategy: Strategy, device: torch.device, *, emulated: bool) -> Mfu | None:
    """None on a CPU, on a GPU that the catalogue lacks, and on an emulated GPU, which computes nothing."""
    if device.type != "cuda" or emulated:
        return None
    gpu = torch.cuda.get_device_properties(device)
    peak = peak_flops(gpu.name, gpu.total_memory, strategy.precision)
    return None if peak is None else Mfu(spec, family, peak * strategy.cp, frozen=strategy.frozen)


def peak_flops(name: str, nbytes: int, precision: Precision) -> float | None:
    """The peak FLOPs a second of a GPU, by its driver's `name` and the bytes that torch sees; None if the catalogue
    lacks it."""
    gpus = named(name)
    if not gpus:
        return None
    rates = min(gpus, key=lambda each: abs(each.usable_bytes - nbytes)).tflops
    dtype = {"bf16": "bfloat16", "bf16_sr": "bfloat16", "fp16": "float16"}.get(precision, "float32")
    return rates.of(dtype, tf32=precision == "tf32")


FLUSH_EVERY = 10


class Metrics:
    """Collects results on the device; averages, writes and shows them every ten steps and after a skipped one.

    Averaging waits for all processes, so it is not done at every step. They exchange numbers through CPU memory.
    """

    def __init__(
        self,
        output: Path,
        peers: Peers,
        device: torch.device,
        *,
        start: int,
        stop: int,
        images: int,
        name_samples: Callable[[int], str],
        memory: Callable[[], Mapping[str, int]],
        written: str | None = None,
        planned_bytes: int | None = None,
        stage: int | None = None,
        mfu: Mfu | None = None,
        trackers: Trackers | None = None,
        collectives: Collectives | None = None,
        cp: int = 1,
    ) -> None:
        """`name_samples(step)`: text that names a step's samples. `memory()`: a row's memory. `cp`: processes per
        sample.

        `written`: the digest of the rows at the checkpoint of step `start`. `stage`: its number in a run with several.
        `trackers` get the rows too. `collectives`: given with several processes; rows then have seconds by rank.
        """
        self._peers = peers
        self._name_samples = name_samples
        self._spikes = LossSpikes()
        self._device, self._memory = device, memory
        self._images = images
        self._stop = stop
        self._pending: list[tuple[int, float, StepResult, Mapping[str, Any]]] = []
        self._skipped_names, self._logged = list[Sequence[str]](), set[str]()  # of each pending step; of all steps
        self._copy = peers.world.rank % cp > 0
        self.skipped_samples = 0
        self._validated: dict[str, Any] = {}
        self.path = output / METRICS
        self._digest = xxhash.xxh3_128()
        self._since = time.perf_counter()
        self._seconds: list[float] = []  # per step, one for each flush
        constants = {"planned_memory_bytes": planned_bytes, "stage": stage}
        self._constants = {key: value for key, value in constants.items() if value is not None}
        self._mfu, self._flops = mfu, 0
        self._trackers = trackers
        self._collectives, self._slow = collectives, SlowRanks()
        self._data_seconds = 0.0
        self._display = Display(start, stop, shown=peers.world.is_main)
        if peers.world.is_main:
            self._keep_rows_before(start, written)

    def __enter__(self) -> Metrics:
        self._display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.__exit__(*error)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time spent inside counts for no step. Waits for the device first."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        if self._collectives is not None:
            self._collectives.counting = False
        yield
        if self._collectives is not None:
            self._collectives.counting = True
        self._since += time.perf_counter() - began

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time spent inside counts as waiting for data."""
        began = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - began

    def add(
        self,
        step: int,
        lr: float,
        result: StepResult,
        micro_batches: Sequence[Micro] = (),
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Add the result of step number `step` (from 1); `more` goes into its row.

        Raises UserError if a step was taken whose loss or norm is not finite.
        """
        self._pending.append((step, lr, result, more))
        batches = () if self._copy else micro_batches
        named = (line for each in batches if isinstance(each, CaptionedBatch) for line in each.skipped)
        self._skipped_names.append([line for line in named if line is not None])
        if self._collectives is not None:
            self._collectives.settle()
        if self._mfu is not None:
            self._flops += self._mfu.flops(micro_batches) or 0
        if len(self._pending) == FLUSH_EVERY or step == self._stop or not result.taken:
            self.flush()

    def flush(self) -> None:
        """Average the pending losses over all processes, check, write and show them."""
        if not self._pending:
            return
        numbers = self._numbers()
        mine = [loss for loss, _ in numbers]
        found = self._peers.gather((mine, self._own_seconds(), self._skipped_names))
        losses = [statistics.fmean(each) for each in zip(*(own for own, *_ in found), strict=True)]
        self._skipped_names = []
        now = time.perf_counter()
        self._seconds.append((now - self._since) / len(self._pending))
        rate = self._images / self._seconds[-1]
        more = {"samples_per_second": rate} | self._utilisation(now - self._since) | {**self._memory()}
        self._since = now
        rows = [
            _row(step, loss, norm, lr, result.taken) | more | self._constants | {**measured}
            for (step, lr, result, measured), loss, (_, norm) in zip(self._pending, losses, numbers, strict=True)
        ]
        if self._collectives is not None and self._peers.world.is_main:
            rows[-1] |= self._by_rank(len(rows), [seconds for _, seconds, _ in found])
        self._pending.clear()
        if self._peers.world.is_main:
            self._count_skipped(rows, [skipped for *_, skipped in found])
            self._notice_spikes(rows)
            self._write(rows)
            if self._trackers is not None:
                self._trackers.add(rows)
            for row in rows:
                self._validated |= {key: row[key] for key in VALIDATED if key in row}
            left = (self._stop - rows[-1]["step"]) * self._seconds[-1]
            self._display.show(self._validated | rows[-1] | {"seconds_left": left})

    def _count_skipped(self, rows: Sequence[dict[str, Any]], found: Sequence[Sequence[Sequence[str]]]) -> None:
        """Count the skipped samples of all processes in each step, and log each sample once."""
        for row, *skipped in zip(rows, *found, strict=True):
            lines = list(itertools.chain.from_iterable(skipped))
            if lines:
                row["skipped_samples"] = len(lines)
                self.skipped_samples += len(lines)
            for line in dict.fromkeys(lines):
                if line not in self._logged:
                    log.notice(f"note: {line}")
            self._logged.update(lines)

    def _own_seconds(self) -> RankSeconds:
        """This process's seconds per pending step."""
        collectives = 0.0 if self._collectives is None else self._collectives.take()
        data, self._data_seconds = self._data_seconds, 0.0
        seconds = (time.perf_counter() - self._since, data, collectives)
        return RankSeconds(socket.gethostname(), *(each / len(self._pending) for each in seconds))

    def _by_rank(self, steps: int, found: list[RankSeconds]) -> dict[str, Any]:
        """The last row's figures by rank; `steps`: the number of rows."""
        for line in self._slow.add(steps, found):
            log.notice(f"note: {line}")
        named = {"step_seconds": "step", "data_seconds": "data", "collective_seconds": "collectives"}
        by_rank: dict[str, Any] = {key: [getattr(each, name) for each in found] for key, name in named.items()}
        return by_rank | ({"slow_ranks": sorted(self._slow.now)} if self._slow.now else {})

    def _numbers(self) -> list[tuple[float, float | None]]:
        """This process's loss and norm of each pending step. Waits for the device once, and allocates nothing there:
        a GPU may be full."""
        results = [result for _, _, result, _ in self._pending]
        losses = [result.loss.to("cpu", non_blocking=True) for result in results]
        norms = [
            None if (norm := result.grad_norm) is None else norm.to("cpu", non_blocking=True) for result in results
        ]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return [(float(loss), None if norm is None else float(norm)) for loss, norm in zip(losses, norms, strict=True)]

    def _utilisation(self, seconds: float) -> dict[str, float]:
        """`mfu` of the pending steps; empty if it is unknown."""
        flops, self._flops = self._flops, 0
        return {"mfu": flops / (seconds * self._mfu.peak)} if self._mfu is not None and flops else {}

    @property
    def digest(self) -> str:
        """The digest of all rows so far, on the main process."""
        return self._digest.hexdigest()

    @property
    def seconds_per_step(self) -> float | None:
        """The median over all flushes but the first, which includes the start. None before the second flush."""
        return statistics.median(self._seconds[1:]) if self._seconds[1:] else None

    def _notice_spikes(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "skipped" not in row and (spike := self._spikes.add(row["loss"])):
                log.notice(f"note: the loss of step {row['step']} {spike}; {self._name_samples(row['step'])}")

    def _write(self, rows: list[dict[str, Any]]) -> None:
        text = _lines(rows)
        self._digest.update(text.encode())
        try:
            with open(self.path, "a") as file:
                file.write(text)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; once it can be written, the same command resumes from "
                "the last checkpoint"
            ) from None

    def _keep_rows_before(self, start: int, written: str | None) -> None:
        """Drop the rows that a resumed run writes again. If training begins at step 0, rename an earlier run's file."""
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] <= start]
        if rows and not start:
            aside = self.path.with_name(f"before-{time.strftime('%Y%m%dT%H%M%S')}-{METRICS}")
            self.path.rename(aside)
            found = how_many(len(rows), "row")
            log.notice(f"note: training begins at step 0; {aside} holds {found} of an earlier run")
        lost = start - len({row["step"] for row in kept})
        if lost:
            log.notice(f"note: {self.path} lacks readable rows of {lost} of the {start} steps before this one")
        text = _lines(kept)
        write_text(self.path, text)
        self._digest.update(text.encode())
        if not lost and written not in (None, self.digest):
            log.notice(f"note: {self.path} was changed: its rows up to step {start} differ from the checkpoint's")


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _row(step: int, loss: float, norm: float | None, lr: float, taken: bool) -> dict[str, Any]:
    """The row of a step. A skipped step has null for numbers that are not finite."""
    row = {"step": step, "loss": loss, "grad_norm": norm, "lr": lr}
    if not taken:
        return row | {"loss": finite(loss), "grad_norm": finite(norm), "skipped": True}
    if finite(loss) is None or finite(norm) is not norm:
        raise UserError(
            f"the loss of step {step} is {loss} at learning rate {lr:.2e}, its gradients' norm {norm}, and the step is "
            "taken; lower strategy.optimizer.lr, lengthen train.warmup_steps, or set strategy.gradient_clipping"
        )
    return row


def finite(number: float | None) -> float | None:
    """The number; None if it is not finite."""
    return number if number is not None and math.isfinite(number) else None


WINDOW, LEAST = 100, 20
"""The most and the fewest earlier losses that a loss is compared with."""

DEVIATIONS, NORMAL = 5.0, 1.4826
"""The median distance from the median, times 1.4826, is the standard deviation of normal numbers. 3.5 deviations are an
outlier; losses of random timesteps have a longer tail. Source: Hampel's identifier and the modified z-score, Iglewicz &
Hoaglin, How to Detect and Handle Outliers, 1993."""


class LossSpikes:
    """Compares each loss with the median of the last 100, by their robust standard deviation."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def add(self, loss: float) -> str | None:
        """Add a loss. Returns a message if it is more than 5 deviations above the median."""
        last = [*self._last]
        self._last.append(loss)
        if len(last) < LEAST:
            return None
        median = statistics.median(last)
        deviation = NORMAL * statistics.median(abs(each - median) for each in last)
        if not loss - median > DEVIATIONS * deviation > 0:
            return None
        return (
            f"is {loss:.4f}, {(loss - median) / deviation:.1f} robust deviations above the median of the last "
            f"{len(last)}, {median:.4f}"
        )


EVERY_S = 60.0
"""Seconds between two lines in pipes, files, and terminals without control codes."""


VALIDATED = {"validation_loss": "validation", "ema_validation_loss": "EMA validation"}
"""Keys that stay on the display until they are measured again, and their names."""


class Display:
    """Shows rows of metrics if `shown`, which is so on the main process alone. It always shows the last row."""

    def __init__(self, start: int, stop: int, *, shown: bool) -> None:
        self._stop, self._shown = stop, shown
        self._bar = _WithFigures(
            *(TextColumn("train"), BarColumn(bar_width=None), MofNCompleteColumn()),
            console=log.err,
            disable=not (shown and log.err.is_interactive),
        )
        self._task = self._bar.add_task("", total=stop, completed=start)
        self._since = time.monotonic()
        self._waiting: dict[str, Any] | None = None

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._log()

    def show(self, row: dict[str, Any]) -> None:
        """Show the row of the last step."""
        if not self._bar.disable:
            self._bar.figures = figures(row)
            self._bar.update(self._task, completed=row["step"])
        elif self._shown:
            self._waiting = row
            if time.monotonic() - self._since >= EVERY_S:
                self._log()

    def _log(self) -> None:
        if self._waiting is not None:
            log.notice(f"step {self._waiting['step']}/{self._stop} · {figures(self._waiting)}")
            self._waiting, self._since = None, time.monotonic()


class _WithFigures(Progress):
    """A bar, with figures on a line below it."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.figures)


def figures(row: dict[str, Any]) -> str:
    """A row as `loss 0.1234 · lr 1.00e-04 · …`."""
    loss, norm, rate = row["loss"], row["grad_norm"], row["samples_per_second"]
    parts = [f"stage {row['stage']}"] if "stage" in row else []
    parts += [f"loss {'–' if loss is None else f'{loss:.4f}'}", f"lr {row['lr']:.2e}"]
    parts += [f"{name} {row[key]:.4f}" for key, name in VALIDATED.items() if row.get(key) is not None]
    parts += [] if norm is None else [f"norm {norm:.3g}"]
    parts += [f"{rate:.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"]
    parts += [f"MFU {100 * row['mfu']:.1f} %"] if "mfu" in row else []
    memory = ("memory_bytes", "now"), ("peak_memory_bytes", "peak"), ("planned_memory_bytes", "planned")
    parts += [", ".join(f"{gib(row[key])} {word}" for key, word in memory if key in row)]
    return " · ".join([*parts, f"{timedelta(seconds=round(row['seconds_left']))} left"])
