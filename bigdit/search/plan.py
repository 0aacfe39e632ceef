"""A plan: the answer to a question, with all that was found on the way. Values only; search/making.py makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from bigdit.memory import Category, Ledger
from bigdit.memory.process import ByteRange
from bigdit.search.host import HostNeed
from bigdit.search.question import Question
from bigdit.spec import BatchShape, StepSize, Strategy, Strict
from bigdit.speed.seconds import Interval, StepTime
from bigdit.units import gib

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


class BucketLimit(Strict):
    """The largest micro-batch of one size in pixels, as it ran where one more does not fit.

    With nothing recomputed, with the recommended number of blocks, and with all. 0 where none fits, or swapped blocks
    have to be recomputed; None where it was not looked for.
    """

    height: PositiveInt
    width: PositiveInt
    none: NonNegativeInt | None
    recommended: NonNegativeInt
    full: NonNegativeInt | None


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

    def holds(self, strategy: Strategy) -> bool:
        """Whether `strategy` is this one at sizes of its own."""
        return alike(self.strategy, strategy)


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
    buckets: tuple[BucketLimit, ...]
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
