"""The account that each process of an emulated script leaves, written by `inside/account.py`.

Nothing in it is trusted: the process runs somebody's code, and what it wrote is data of a fixed form, or not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from bigdit.spec import Strict

MOST_BYTES = 64 * 2**20
"""Of an account: one of 2,000 points and 40 groups has less than a megabyte."""

Name = Annotated[str, Field(max_length=4096)]
PhaseName = Literal["start", "forward", "backward", "step"]


class Line(Strict):
    """A line of python; `own`: of the script rather than of an installed library."""

    file: Name
    line: NonNegativeInt
    name: Name
    code: Name
    own: bool


class Live(Strict):
    """Live tensors that the same lines made in the same phase: their blocks' bytes, and how many they are.

    `script` is the script's innermost line, `library` the innermost of a library within it. The last group of a list
    may be all that is left, without a phase.
    """

    script: Line | None
    library: Line | None
    phase: PhaseName | None
    nbytes: NonNegativeInt
    count: PositiveInt


class PhasePeaks(Strict):
    """The most that was allocated and reserved in a phase, over all steps."""

    phase: PhaseName
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt


class Span(Strict):
    """Where a phase begins, as a number of the allocator's events."""

    phase: PhaseName
    start: NonNegativeInt


class CardAccount(Strict):
    """What a process took of one card. `curve`: event, bytes allocated and reserved after it; the highest of each
    stretch. `phases_off_bytes`: how far the replay by phase came off torch's own figures."""

    index: NonNegativeInt
    name: Name
    compute_capability: tuple[NonNegativeInt, NonNegativeInt]
    total_bytes: PositiveInt
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    peak_phase: PhaseName
    peak_event: NonNegativeInt
    retries: NonNegativeInt
    phases: Annotated[tuple[PhasePeaks, ...], Field(max_length=8)]
    phases_off_bytes: NonNegativeInt
    spans: Annotated[tuple[Span, ...], Field(max_length=4000)]
    events: NonNegativeInt
    curve: Annotated[tuple[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt], ...], Field(max_length=2000)]
    live: Annotated[tuple[Live, ...], Field(max_length=64)]


class OutOfMemory(Strict):
    """A time that memory ran out: what was asked, what the card had free, and the stack, innermost first."""

    card: NonNegativeInt
    asked_bytes: NonNegativeInt
    free_bytes: NonNegativeInt
    total_bytes: NonNegativeInt
    allocated_bytes: NonNegativeInt
    phase: PhaseName
    steps: NonNegativeInt
    frames: Annotated[tuple[Line, ...], Field(max_length=64)]
    live: Annotated[tuple[Live, ...], Field(max_length=64)]


class Uncaught(Strict):
    """The exception that ended the process, with its stack, innermost first."""

    type: Name
    text: Name
    out_of_memory: bool
    frames: Annotated[tuple[Line, ...], Field(max_length=64)]


class Notice(Strict):
    """What a reader of the figures must know, how often it happened, and at which line of the script first."""

    text: Name
    count: PositiveInt
    place: Line | None


class Account(Strict):
    """One process that used a card."""

    pid: PositiveInt
    rank: NonNegativeInt | None
    world_size: PositiveInt
    argv: Annotated[tuple[Name, ...], Field(max_length=10_000)]
    versions: dict[str, str]
    ended: Literal["exit", "exception", "signal", "steps", "exec"]
    error: Uncaught | None
    seconds: NonNegativeFloat
    steps: NonNegativeInt
    skipped_steps: NonNegativeInt
    backwards: NonNegativeInt
    stepped_after_oom: bool
    computed_after_oom: bool
    loss_scaler: bool
    host_bytes: NonNegativeInt
    cards: Annotated[tuple[CardAccount, ...], Field(max_length=64)]
    out_of_memory: Annotated[tuple[OutOfMemory, ...], Field(max_length=32)]
    out_of_memory_count: NonNegativeInt
    work: dict[str, int]
    work_by_step: Annotated[tuple[dict[str, int], ...], Field(max_length=1000)]
    notices: Annotated[tuple[Notice, ...], Field(max_length=100)]

    def fits(self, ended_well: bool) -> bool:
        """Whether memory never ran out, or the script caught it and went on: as a training it stepped after that; as
        another program it computed, or began anew, and its command `ended_well`."""
        if self.error is not None and self.error.out_of_memory:
            return False
        if not self.out_of_memory_count or self.stepped_after_oom:
            return True
        trains = self.backwards > 0 and self.steps == 0
        return ended_well and (self.ended == "exec" or (self.computed_after_oom and not trains))

    @property
    def title(self) -> str:
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"


def read_account(path: Path) -> Account | None:
    """The account in a file; None where it is not one."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        return Account.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
