"""A checked request and the plan that answers it: values only. search/answer.py makes plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from bigdit.catalog import CatalogModel, Gpu, batch_shape
from bigdit.catalog.context import degrees
from bigdit.config.plan_file import Asked, Expected, Fewer, LargestMicroBatch, PlanFile, text_digest
from bigdit.config.strategy_text import LARGEST_MICRO_BATCH, PRESETS
from bigdit.documents import Count, Natural, Positive, Side, Switch
from bigdit.encoders.host_bytes import HostWeights
from bigdit.memory import Ledger, Timeline, host_memory
from bigdit.memory.process import ByteRange
from bigdit.speed.seconds import Cluster, Interval, StepTime
from bigdit.strategy import (
    OPTIMIZERS,
    BatchShape,
    ControlNetSpec,
    LoraBase,
    LoraSpec,
    OptimizerName,
    Precision,
    SegmentSpec,
    StepSize,
    Strategy,
    Strict,
    Widths,
)
from bigdit.units import GIB, MIB, gib

EngineChoice = Literal[
    "single",
    "ddp",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2-offload",
    "zero3-offload",
    "zero3-offload-all",
    "fsdp2",
    "fsdp2-offload",
]
"""Engines by the names of config/strategy_text.py's presets."""


class Constraints(Strict):
    """What the user has fixed; None leaves it to the search. `full`: full fine-tuning only, never LoRA."""

    engine: EngineChoice | None = None
    optimizer: OptimizerName | None = None
    precision: Precision | None = None
    checkpointed_blocks: Natural | Literal["all"] | None = None
    checkpointed_segments: SegmentSpec | None = None
    micro_batch_size: Annotated[Count, Field(le=LARGEST_MICRO_BATCH)] | None = None
    ema: Literal["none", "auto", "gpu", "cpu"] = "none"
    ema_widths: Widths | None = None
    lora: LoraSpec | None = None
    lora_base: LoraBase | None = None
    controlnet: ControlNetSpec | None = None
    features: Literal["cached", "online"] = "cached"
    compile: Switch = False
    float8: Literal["tensorwise", "rowwise"] | None = None
    cp: Literal[1, 2, 4, 8] | None = None
    full: Switch = False

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.lora is not None or self.controlnet is not None

    @property
    def lora_bases(self) -> tuple[LoraBase | None, ...]:
        """Dtypes to try for frozen weights; None where nothing is frozen. fp8 takes as much memory as int8 and has a
        larger error: it is tried only on request."""
        if not self.frozen:
            return (None,)
        return ("bf16", "int8", "nf4") if self.lora_base is None else (self.lora_base,)

    def strategy(self, preset: str, base: str | None, ema: str | None, **settings: Any) -> Strategy:
        """The strategy of a preset with what is fixed, this dtype of frozen weights and this place of the EMA.

        Raises ValidationError where Strategy's rules refuse it.
        """
        lora, controlnet = (each and each.model_dump() | {"base": base} for each in (self.lora, self.controlnet))
        fixed = {
            "lora": lora,
            "controlnet": controlnet,
            "features": self.features,
            "compile_blocks": self.compile,
            "float8": self.float8 or "none",
            "ema": ema and {"device": ema, "widths": self.ema_widths},
        }
        return Strategy.model_validate(PRESETS[preset] | fixed | settings)


class ResolvedRequest(Strict):
    """A PlanRequest, looked up and checked.

    `host_memory_bytes` is the memory of one machine. If it is only assumed (`host_assumed`), it decides no verdict: the
    search only prefers what fits it. `resolution` is (height, width) in pixels; `frames` are those of a video.
    `buckets` are further sizes whose largest micro-batch is asked for. The data set has `images`; all are encoded, and
    all but `validated` are trained on, `epochs` times. `samples` are weights in CPU memory that generate validation
    images, None where the run generates none. `price` is of one GPU-hour, in the user's currency. `receipts` is a
    folder of measured runs, which calibrate plans of the same GPU. `explain` shows each change from the usual setting
    to the recommended one. `from_scratch`: training starts from random weights.
    """

    model: CatalogModel
    gpu: Gpu
    cluster: Cluster = Cluster()
    host_memory_bytes: Count = 64 * GIB
    host_assumed: Switch = False
    resolution: tuple[Side, Side]
    frames: Count | None = None
    buckets: tuple[tuple[Side, Side], ...] = ()
    global_batch_size: Count | None = None
    images: Count | None = None
    validated: Natural = 0
    samples: HostWeights | None = None
    epochs: Positive = 1.0
    price: Positive | None = None
    receipts: Path | None = None
    constraints: Constraints = Constraints()
    from_scratch: Switch = False
    explain: Switch = False

    @property
    def usable_bytes(self) -> int:
        """Bytes of each GPU that a plan may use, with the CUDA context."""
        return self.gpu.usable_bytes

    def over(self, cluster: Cluster) -> ResolvedRequest:
        """The request on other GPUs. Assumed CPU memory is proportional to the GPUs of a machine."""
        host = self.gpu.host_bytes * cluster.processes_per_node if self.host_assumed else self.host_memory_bytes
        return self.model_copy(update={"cluster": cluster, "global_batch_size": None, "host_memory_bytes": host})

    @property
    def degrees(self) -> list[int]:
        """Degrees of context parallelism that all sizes allow. Unless fixed, at most a machine's GPUs; and where
        possible, so many that each group has a sample of the global batch."""
        shapes = [batch_shape(self.model, size, self.frames) for size in (self.resolution, *self.buckets)]
        text = None if shapes[0].text is None else shapes[0].text[0]
        found = degrees(self.model.spec, [grid for each in shapes for grid in each.grids], text)
        fixed, most = self.constraints.cp, self.cluster.gpus_per_node
        found = [cp for cp in found if self.cluster.gpus % cp == 0 and (cp == fixed if fixed else cp <= most)]
        if self.global_batch_size is None:
            return found
        one_pass = self.cluster.gpus * (self.constraints.micro_batch_size or 1)
        return [cp for cp in found if self.global_batch_size * cp >= one_pass] or found

    def share(self, groups: int) -> int | None:
        """Samples of a step for each of so many groups of GPUs, with repeated samples that fill the last groups."""
        return None if self.global_batch_size is None else -(-self.global_batch_size // groups)

    def short_of_host(self, nbytes: int) -> bool:
        """Whether a machine has less memory than that, and its memory is not only assumed."""
        return nbytes > self.host_memory_bytes and not self.host_assumed


def lossy_by(strategy: Strategy) -> list[str]:
    """Why a strategy does not give the numbers of AdamW with fp32 masters, in a few words each."""
    found, name = [], strategy.optimizer.name
    if strategy.packed:
        found.append(f"quantised base ({strategy.base})")
    if "adamw" in name and "bit" in name:
        found.append(f"{'4' if '4bit' in name else '8'}-bit optimizer state")
    elif name != "adamw":
        found.append(f"{OPTIMIZERS[name]} instead of AdamW")
    if strategy.precision == "bf16_sr":
        found.append("no fp32 master weights")
    return found


Verdict = Literal["FITS", "TIGHT", "DOES NOT FIT"]


class Margin(Strict):
    """The share by which torch may reserve more on a real GPU than on an emulated one, and its source."""

    share: float = Field(ge=0, lt=1)
    source: str


class Estimate(Strict):
    """The memory and speed of two steps of a strategy on one GPU.

    `source`: "predicted" from attempts at other sizes; "ran" on an emulated GPU; "recorded", under the recorder too.
    `option` names engine, optimizer, precision and EMA; `title` the sizes too; `reason` is why the plan lists it.
    `phases` has the peak of allocated bytes of each phase; `peak_reserved_bytes` is with expandable segments.
    `process` adds the safety margin and `non_torch`; `headroom_bytes` is what its high end leaves of the GPU.
    `host_bytes` is the memory of all processes of a machine while they save. `lossless`: the numbers are those of AdamW
    with fp32 masters, except for FP8 where that is asked for.
    """

    option: str
    title: str
    strategy: Strategy
    source: Literal["predicted", "ran", "recorded"]
    phases: dict[str, NonNegativeInt]
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    non_torch: ByteRange
    process: ByteRange
    verdict: Verdict
    headroom_bytes: int
    host_bytes: NonNegativeInt
    step: StepTime
    samples_per_second_per_gpu: Interval
    lossless: bool
    reason: str = ""

    @property
    def micro_batch_size(self) -> int:
        return self.strategy.micro_batch_size

    @property
    def blocks(self) -> int:
        """The number of recomputed blocks."""
        return int(self.strategy.checkpointed_blocks)

    @property
    def sizes(self) -> dict[str, int]:
        return {"micro_batch_size": self.micro_batch_size, "checkpointed_blocks": self.blocks}

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])


def process(reserved_bytes: int, non_torch: ByteRange, margin: Margin) -> ByteRange:
    """GPU memory of the process: what torch reserves, up to the margin more, and what is outside torch."""
    more = math.ceil(reserved_bytes * margin.share)
    return ByteRange(low_bytes=reserved_bytes, high_bytes=reserved_bytes + more) + non_torch


def safe_bytes(gpu: Gpu, non_torch: ByteRange, margin: Margin) -> int:
    """The most that torch may reserve on the GPU for a step to FIT."""
    return max(int((gpu.usable_bytes - non_torch.high_bytes) / (1 + margin.share)), 1)


def verdict_of(taken: ByteRange, usable_bytes: int) -> Verdict:
    """FITS: the GPU has the high end of `taken`. TIGHT: it has only the low end."""
    if taken.high_bytes <= usable_bytes:
        return "FITS"
    return "TIGHT" if taken.low_bytes <= usable_bytes else "DOES NOT FIT"


class Rejected(Strict):
    """An obvious choice that was rejected, and why."""

    choice: str
    reason: str


class DatasetNeed(Strict):
    """The latent and embedding cache of `images` samples. Latents and texts are in bytes per sample.

    `text_bytes` are as stored, `padded_text_bytes` with padding. `extraction_seconds` is on all GPUs of the cluster
    together, None where the encoders are not known.
    """

    images: PositiveInt
    latent_bytes: NonNegativeInt
    text_bytes: Interval
    padded_text_bytes: NonNegativeInt
    store_bytes: Interval
    extraction_seconds: Interval | None
    notes: tuple[str, ...]


HOUR = 3600.0


class WholeRun(Strict):
    """The whole training: optimizer steps, and seconds, GPU-hours and money as intervals."""

    steps: PositiveInt
    seconds: Interval
    gpu_hours: Interval
    money: Interval | None
    samples_per_second: Interval

    @classmethod
    def of(
        cls, images: int, epochs: float, global_batch_size: int, step: StepTime, gpus: int, price: float | None
    ) -> WholeRun:
        """`images` trained on `epochs` times in steps of `global_batch_size`; the last one is full too.

        `price` is of one GPU-hour. Time without training (first data, checkpoints, validation, a queue) is not counted.
        """
        steps = max(1, math.ceil(images * epochs / global_batch_size))
        seconds = step.seconds * steps
        gpu_hours = seconds * (gpus / HOUR)
        return cls(
            steps=steps,
            seconds=seconds,
            gpu_hours=gpu_hours,
            money=None if price is None else gpu_hours * price,
            samples_per_second=step.seconds.per(global_batch_size),
        )


class WaterfallStep(Strict):
    """One bar of the waterfall from the naive setting to the recommended one. Each ran on an emulated GPU."""

    change: str
    process_bytes: NonNegativeInt
    verdict: Verdict
    saved_by: str


class HostNeed(Strict):
    """CPU memory, in bytes. `process_bytes` is the peak of one process's tensors: first the loaded model, then
    offloaded state, pinned buffers and batches read ahead. `steps_bytes` is its peak during steps, `page_locked_bytes`
    of it locked. A save copies `checkpoint_bytes` more. `samples_bytes` are the weights that generate validation images
    in the main process. `node_bytes` is all processes of its machine, with libraries."""

    process_bytes: NonNegativeInt
    steps_bytes: NonNegativeInt
    checkpoint_bytes: NonNegativeInt
    samples_bytes: NonNegativeInt
    page_locked_bytes: NonNegativeInt
    processes_per_node: PositiveInt
    node_bytes: NonNegativeInt


class Plan(Strict):
    """The answer. `chosen` is the recommended strategy, or the one nearest to fitting where `verdict` is DOES NOT FIT.

    `ledger` and `packed_timeline` (see memory.Timeline) are of the chosen strategy's recorded steps. `smaller` are
    smaller sizes of its step, in case training still runs out of memory. `curves` has the bytes of its process by
    micro-batch size, a curve for each number of recomputed blocks. `front` is the Pareto front of memory against speed.
    `passed_over` is the title of its lossless estimate that a much faster one replaced. `ran` has all that ran of
    explored options, at divisors of the global batch. `same_kernels` has usable bytes of GPUs that run the same
    kernels, by title, the request's first. `buckets` is empty where the machine is short of memory: no micro-batch fits
    then. `fixes` would fit, where nothing that was asked for does. `emulated`: the torch build that ran on emulated
    GPUs.
    """

    request: ResolvedRequest
    params: PositiveInt
    batch: BatchShape
    verdict: Verdict
    margin: Margin
    chosen: Estimate
    ledger: Ledger
    packed_timeline: str = Field(repr=False)
    host: HostNeed
    front: tuple[Estimate, ...]
    passed_over: str | None
    rejected: tuple[Rejected, ...]
    buckets: tuple[LargestMicroBatch, ...]
    curves: dict[str, dict[PositiveInt, NonNegativeInt]]
    ran: tuple[Estimate, ...]
    same_kernels: dict[str, PositiveInt]
    smaller: tuple[StepSize, ...]
    without_machine: Fewer | None
    fixes: tuple[Estimate, ...]
    dataset: DatasetNeed | None
    run: WholeRun | None
    waterfall: tuple[WaterfallStep, ...]
    calibration: str
    notices: tuple[str, ...]
    versions: dict[str, str]
    emulated: str
    catalogue: str
    seconds: PositiveFloat

    def __repr__(self) -> str:
        """One line for debuggers and notebooks: the request, the verdict, and the needed share of the GPU."""
        request, chosen = self.request, self.chosen
        gpus = f"{request.cluster.gpus} × {request.gpu.name}" if request.cluster.gpus > 1 else request.gpu.name
        needs = f"{gib(chosen.process.high_bytes)} of {gib(request.usable_bytes)}"
        return f"<Plan {request.model.name} on {gpus}: {self.verdict}, {chosen.title}, {needs}>"

    __str__ = __repr__

    @property
    def fits(self) -> bool:
        """Whether the chosen strategy fits, with or without the margin."""
        return self.verdict != "DOES NOT FIT"

    def noted(self, notices: Sequence[str]) -> Plan:
        """The plan with further notices."""
        return self.model_copy(update={"notices": (*self.notices, *notices)})

    @property
    def short_of_host(self) -> bool:
        """Whether a machine has too little CPU memory, and its memory is not only assumed."""
        return self.request.short_of_host(self.chosen.host_bytes)


LIBRARIES_BYTES = 3100 * MIB
"""CPU memory of Python, torch and other libraries in a process that trains on a GPU, without tensors.

Without CUDA, 494 MiB: resident set after the imports of a training process on Linux x86-64 (Python 3.11,
torch 2.13.0+cpu, DeepSpeed 0.19.8, diffusers 0.42.1, transformers 5.23, bitsandbytes 0.50.2), of which 110 MiB are
shared between processes; torch alone is 218 MiB of it. With CUDA, a program took 2.746 GiB instead of 358 MiB
(pytorch/pytorch#70416, libtorch of 2021): 2454 MiB more for the host side of driver and libraries. The sum is rounded
up. It is an upper bound: CUDA has loaded its kernels lazily since 11.7, and takes less today.
"""


def host_need(
    host_timeline: Timeline, checkpoint_bytes: int, cluster: Cluster, samples: HostWeights | None = None
) -> HostNeed:
    """CPU memory of a machine of `cluster`, whose processes each did as recorded.

    `host_timeline` has two steps and the start, when each process holds the whole model (and online encoders) before it
    moves to the GPU. Each saves `checkpoint_bytes`; the main one also generates `samples`. The page cache of stored
    features is not counted: the system only uses free memory for it.
    """
    host = host_memory(host_timeline)
    return HostNeed(
        process_bytes=host.peak_bytes,
        steps_bytes=host.steps_bytes,
        checkpoint_bytes=checkpoint_bytes,
        samples_bytes=0 if samples is None else samples.known_bytes,
        page_locked_bytes=host.page_locked_bytes,
        processes_per_node=cluster.processes_per_node,
        node_bytes=node_bytes(host.saving(checkpoint_bytes), cluster, samples),
    )


def node_bytes(process_bytes: int, cluster: Cluster, samples: HostWeights | None = None) -> int:
    """CPU memory of the first machine, which has the main process. Each process has tensors of `process_bytes`."""
    generating = 0 if samples is None else samples.known_bytes
    return cluster.processes_per_node * (process_bytes + LIBRARIES_BYTES) + generating


def uncounted(samples: HostWeights | None) -> tuple[str, ...]:
    """A line where the CPU memory of generating validation images is not known."""
    if samples is None or samples.unknown is None:
        return ()
    return (f"samples: the CPU memory of the {samples.unknown} is not known, and not counted: no weights there",)


def record(plan: Plan, run: str | None = None) -> PlanFile:
    """The contents of plan.yaml, which training reads. `run`: the text of the run.yaml in its folder."""
    request, chosen = plan.request, plan.chosen
    rate = chosen.samples_per_second_per_gpu
    return PlanFile(
        model=request.model.spec,
        batch=plan.batch,
        request=Asked(
            gpu=request.gpu.name,
            gpus_per_node=request.cluster.gpus_per_node,
            resolution=request.resolution,
            frames=request.frames,
        ),
        strategy=chosen.strategy,
        expandable_segments=True,
        expected=Expected(
            verdict=plan.verdict,
            usable_bytes=request.usable_bytes,
            peak_allocated_bytes=chosen.peak_allocated_bytes,
            peak_reserved_bytes=chosen.peak_reserved_bytes,
            process_bytes=(chosen.process.low_bytes, chosen.process.high_bytes),
            samples_per_second_per_gpu=(rate.low, rate.high),
            host_bytes=plan.host.node_bytes,
        ),
        micro_batch_sizes=plan.buckets,
        smaller=plan.smaller,
        without_machine=plan.without_machine,
        phases={phase.phase: phase.peak_bytes for phase in plan.ledger.phases},
        encoder_bytes=max(phase.at_peak.get("encoder", 0) for phase in plan.ledger.phases),
        versions=plan.versions,
        catalogue=plan.catalogue,
        run_digest=None if run is None else text_digest(run),
    )
