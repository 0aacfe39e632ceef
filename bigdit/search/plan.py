"""A plan: the answer to a question, with all that was found on the way. Values only; search/making.py makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from bigdit.config.plan_file import Asked, Expected, LargestMicroBatch, PlanFile, RecordedLedger, text_digest
from bigdit.encoders.host_bytes import HostWeights
from bigdit.memory import Category, Ledger, Timeline, host_memory
from bigdit.memory.process import ByteRange
from bigdit.search.question import Question
from bigdit.speed.seconds import Cluster, Interval, StepTime
from bigdit.strategy import BatchShape, StepSize, Strategy, Strict
from bigdit.units import MIB, gib

Verdict = Literal["FITS", "TIGHT", "DOES NOT FIT"]


class Choice(Strict):
    """One strategy, what it takes of the card and how fast it goes.

    `title` says what sets it apart in a few words; `reason` why it is listed. Two steps ran so on an emulated GPU:
    `phases` are the most bytes that torch allocated in each, `peak_reserved_bytes` what it reserved with expandable
    segments. `process` adds the safety margin and what is not torch's; `headroom_bytes` is what the GPU has left at the
    high end of `process`. `host_bytes` are what the processes
    of a machine take of its memory, while they save. `lossless`: the numbers are those of AdamW with fp32 masters.
    """

    title: str
    strategy: Strategy
    phases: dict[str, NonNegativeInt]
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    process: ByteRange
    verdict: Verdict
    headroom_bytes: int
    host_bytes: NonNegativeInt
    step: StepTime
    samples_per_second_per_card: Interval
    lossless: bool
    reason: str


class Rejected(Strict):
    """An obvious choice that was not taken, and why."""

    choice: str
    reason: str


class Curve(Strict):
    """Peak of the process (high end, bytes) against the micro-batch size, as steps ran on an emulated GPU."""

    label: str
    micro_batch_sizes: tuple[PositiveInt, ...]
    process_bytes: tuple[NonNegativeInt, ...]


class Point(Strict):
    """A micro-batch size with a number of recomputed blocks, as two steps ran on an emulated GPU.

    `at_peak` is what was allocated where the peak `phase` is highest, by category; empty where the steps were not
    recorded. `peak_reserved_bytes`, `process`, `host_bytes` and `verdict` are as in Choice.
    """

    micro_batch_size: PositiveInt
    checkpointed_blocks: NonNegativeInt
    phase: str
    at_peak: dict[Category, NonNegativeInt]
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    process: ByteRange
    host_bytes: NonNegativeInt
    verdict: Verdict
    samples_per_second_per_card: Interval


class Room(Strict):
    """A card on which all that a process takes is the same, and what it may take there."""

    card: str
    usable_bytes: PositiveInt


class Setting(Strict):
    """What the search looked at in one engine, optimizer, precision and average: `strategy`, but for its sizes, at a
    grid of them, micro-batch sizes one after another. `beside`: what of each process is not torch's; `rooms`: the
    question's card, then others of the catalogue."""

    title: str
    strategy: Strategy
    non_torch: ByteRange
    rooms: tuple[Room, ...]
    points: tuple[Point, ...]


def alike(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies differ in the sizes of their steps alone."""
    return one.checkpointing == other.checkpointing and one.sized(other.step_size) == other


class Band(Strict):
    """How much more than predicted torch may reserve on a real card, as a share of it, and where that comes from."""

    share: float = Field(ge=0, lt=1)
    source: str


class DatasetNeed(Strict):
    """The feature store of `images` samples. Bytes a sample; its texts as they are stored (low to high) and padded.

    `extraction_seconds` is over all cards of the cluster, None where the encoders are not known.
    """

    images: PositiveInt
    latent_bytes: NonNegativeInt
    text_bytes: Interval
    padded_text_bytes: NonNegativeInt
    store_bytes: Interval
    extraction_seconds: Interval | None
    notes: tuple[str, ...]


class Run(Strict):
    """The whole training: optimizer steps, and seconds, GPU-hours and money as intervals."""

    steps: PositiveInt
    seconds: Interval
    gpu_hours: Interval
    money: Interval | None
    samples_per_second: Interval


class Step(Strict):
    """One bar of the waterfall from the naive setting to what fits: what was changed, and what it left.

    Each ran on an emulated GPU.
    """

    change: str
    process_bytes: NonNegativeInt
    verdict: Verdict
    saved_by: str


class HostNeed(Strict):
    """`process_bytes` are tensors of one process at the most (the model as it is loaded; then offloaded state, pinned
    buffers, batches read ahead), and `steps_bytes` those of its steps, of which `page_locked_bytes` are locked;
    `checkpoint_bytes` beside the latter are the copy that it saves its state from;
    `samples_bytes` are weights that the main process draws pictures on the way with; `node_bytes` is the sum over the
    processes of the machine that has it, with the libraries'."""

    process_bytes: NonNegativeInt
    steps_bytes: NonNegativeInt
    checkpoint_bytes: NonNegativeInt
    samples_bytes: NonNegativeInt
    page_locked_bytes: NonNegativeInt
    processes_per_node: PositiveInt
    node_bytes: NonNegativeInt


class Plan(Strict):
    """The answer. `chosen` is the recommended strategy, or the one nearest to fitting where `verdict` is DOES NOT FIT.

    `ledger` and `packed_timeline` (see memory.Timeline) are of the chosen strategy's recorded steps; `non_torch` is
    what its process takes of the GPU beside torch;
    `smaller` are sizes of its step that take less, for training that runs out of memory after all;
    `emulated`: the build of torch that ran on emulated GPUs.
    `buckets` are none where the machine is short of memory, since it is so with any micro-batch;
    `fixes` are what would fit, where nothing asked for does; `front` is the Pareto front of memory against speed;
    `settings` are what else may be asked of the page.
    """

    question: Question
    params: PositiveInt
    batch: BatchShape
    verdict: Verdict
    band: Band
    chosen: Choice
    ledger: Ledger
    non_torch: ByteRange
    packed_timeline: str = Field(repr=False)
    host: HostNeed
    front: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    buckets: tuple[LargestMicroBatch, ...]
    curves: tuple[Curve, ...]
    settings: tuple[Setting, ...]
    smaller: tuple[StepSize, ...]
    fixes: tuple[Choice, ...]
    dataset: DatasetNeed | None
    run: Run | None
    waterfall: tuple[Step, ...]
    calibration: str
    notices: tuple[str, ...]
    versions: dict[str, str]
    emulated: str
    catalogue: str
    seconds: PositiveFloat

    def __repr__(self) -> str:
        """One line, for debuggers and notebooks: the question, the verdict, and what is wanted of what there is."""
        question, chosen = self.question, self.chosen
        cards = f"{question.cluster.gpus} × {question.gpu.name}" if question.cluster.gpus > 1 else question.gpu.name
        wants = f"{gib(chosen.process.high_bytes)} of {gib(question.gpu.usable_bytes)}"
        return f"<Plan {question.model.name} on {cards}: {self.verdict}, {chosen.title}, {wants}>"

    __str__ = __repr__

    @property
    def fits(self) -> bool:
        """Whether the chosen strategy fits, with or without the band."""
        return self.verdict != "DOES NOT FIT"

    def noted(self, notices: Sequence[str]) -> Plan:
        """The plan with further notices."""
        return self.model_copy(update={"notices": (*self.notices, *notices)})

    @property
    def short_of_host(self) -> bool:
        """Whether a machine that is known has too little memory beside its cards."""
        return self.question.short_of_host(self.chosen.host_bytes)


LIBRARIES_BYTES = 3100 * MIB
"""What Python, torch and the other libraries take in a process that trains on a card, beside its tensors.

Without CUDA, 494 MiB: resident set after the imports of a training process on Linux x86-64 (Python 3.11,
torch 2.13.0+cpu, DeepSpeed 0.19.8, diffusers 0.42.1, transformers 5.23, bitsandbytes 0.50.2), of which 110 MiB are
shared between processes; torch alone is 218 MiB of it. With CUDA, 2.746 GiB where the same program takes 358 MiB
without (pytorch/pytorch#70416, libtorch of 2021): 2454 MiB more for the driver's and the libraries' host side. CUDA
has loaded its kernels lazily since 11.7, and takes less: rounded up, this is a bound and no measurement of today's
builds.
"""


def host_need(
    host_timeline: Timeline, checkpoint_bytes: int, cluster: Cluster, samples: HostWeights | None = None
) -> HostNeed:
    """What a machine of `cluster` needs for processes that each did as recorded, save so many bytes, and draw
    `samples`.

    In `host_timeline` are the start, when each process holds the whole model (and the encoders, with features
    online) before it moves to the card, and two steps. The page cache of a feature store's files is not counted:
    the system takes what is free for it.
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
    """What the processes of the first machine take that each have tensors of so many bytes; the main one is there."""
    drawn = 0 if samples is None else samples.known_bytes
    return cluster.processes_per_node * (process_bytes + LIBRARIES_BYTES) + drawn


def uncounted(samples: HostWeights | None) -> tuple[str, ...]:
    """A line where it is not known what pictures on the way take."""
    if samples is None or samples.unknown is None:
        return ()
    return (f"samples: what the {samples.unknown} takes of the host is not known, and not counted: no weights there",)


def record(plan: Plan, run: str | None = None) -> PlanFile:
    """What training by `plan` needs beside its strategy, and what its receipt is to be compared with; `run`: the text
    of the run.yaml beside it."""
    question, chosen = plan.question, plan.chosen
    rate = chosen.samples_per_second_per_card
    return PlanFile(
        model=question.model.spec,
        batch=plan.batch,
        question=Asked(
            gpu=question.gpu.name,
            gpus_per_node=question.cluster.gpus_per_node,
            resolution=question.resolution,
            frames=question.frames,
        ),
        strategy=chosen.strategy,
        expandable_segments=True,
        expected=Expected(
            verdict=plan.verdict,
            usable_bytes=question.gpu.usable_bytes,
            peak_allocated_bytes=chosen.peak_allocated_bytes,
            peak_reserved_bytes=chosen.peak_reserved_bytes,
            process_bytes=(chosen.process.low_bytes, chosen.process.high_bytes),
            samples_per_second_per_card=(rate.low, rate.high),
            host_bytes=plan.host.node_bytes,
        ),
        micro_batch_sizes=plan.buckets,
        smaller=plan.smaller,
        ledger=RecordedLedger.model_validate(plan.ledger.model_dump(mode="json")),
        versions=plan.versions,
        catalogue=plan.catalogue,
        run_digest=None if run is None else text_digest(run),
    )
