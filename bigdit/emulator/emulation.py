"""What an emulated command did: its runs, what each process took of its card, and what must be said of it.

Nothing is trusted in the account that each process of a script leaves (`inside/account.py` writes it): the process runs
somebody's code, and what it wrote is data of a fixed form, or not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from bigdit.catalog import Gpu
from bigdit.emulator.fake_weights import option_for
from bigdit.memory.process import ByteRange, beside_torch
from bigdit.strategy import Strict

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


EXIT_DOES_NOT_FIT = 2
EXIT_FAILED = 1
"""In place of a command's own 2, which would read as the one above."""


class Run(Strict):
    """The command from its start to its end. `lost`: processes that used a card and left no account; `crowd`: how
    many processes it started on this machine where they are more than the cards, else 0; `absent`: the hub's
    repositories for want of which processes ended."""

    first_step_skipped: bool
    exit_status: NonNegativeInt
    seconds: NonNegativeFloat
    accounts: tuple[Account, ...]
    lost: tuple[NonNegativeInt, ...]
    crowd: NonNegativeInt
    absent: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """None where that is not known: the command failed, or no process of it used a card."""
        if not all(map(self.holds, self.accounts)):
            return False
        return True if self.accounts and self.exit_status == 0 else None

    def holds(self, account: Account) -> bool:
        """Whether memory never ran out in one of its processes, or that went on."""
        return account.fits(self.exit_status == 0)

    def shortage(self, account: Account) -> OutOfMemory | None:
        """The time that memory ran out for good in one of its processes."""
        return None if self.holds(account) else next(reversed(account.out_of_memory), None)

    @property
    def out_of_memory_count(self) -> int:
        return sum(account.out_of_memory_count for account in self.accounts)

    @property
    def scales_loss(self) -> bool:
        return any(account.loss_scaler for account in self.accounts)

    @property
    def highest(self) -> tuple[Account, CardAccount] | None:
        """The process and card with the most reserved memory; one that ran out before all others."""
        found = [(account, card) for account in self.accounts for card in account.cards]
        return max(found, key=lambda each: (not self.holds(each[0]), each[1].peak_reserved_bytes), default=None)


class Emulation(Strict):
    """A command on emulated cards: as it is, and where a loss scaler was seen with its first step skipped too."""

    command: tuple[str, ...]
    gpu: Gpu
    cards: PositiveInt
    runs: tuple[Run, ...]

    @property
    def decisive(self) -> Run:
        """The run that decides: one that does not fit, else one that gave no answer."""
        return min(self.runs, key=lambda run: (False, None, True).index(run.fits))

    @property
    def fits(self) -> bool | None:
        return self.decisive.fits

    @property
    def exit_status(self) -> int:
        """2 only where a process ran out of memory and did not go on; else the command's own, 1 for its 2."""
        if self.fits is False:
            return EXIT_DOES_NOT_FIT
        own = next((run.exit_status for run in self.runs if run.exit_status), 0)
        return EXIT_FAILED if own == EXIT_DOES_NOT_FIT else own

    def process(self, account: Account, card: CardAccount) -> ByteRange:
        """What nvidia-smi would show of a process at its peak: reserved memory, CUDA context and NCCL."""
        reserved = ByteRange(low_bytes=card.peak_reserved_bytes, high_bytes=card.peak_reserved_bytes)
        return reserved + self.beside(account)

    def beside(self, account: Account) -> ByteRange:
        """What a process takes of a card beside torch's reserved memory: CUDA context and NCCL."""
        gpu = self.gpu
        return beside_torch(gpu.compute_capability, account.world_size, multiprocessors=gpu.multiprocessors)

    @property
    def notices(self) -> list[str]:
        """What must be said, a line each; of a second run only what the first did not have."""
        found: dict[str, str] = {}
        for run in self.runs:
            of = "with the first step skipped, " if run.first_step_skipped else ""
            for text, details in _notices(run):
                found.setdefault(text, of + (f"{text} ({details})" if details else text))
        return list(found.values())


def _notices(run: Run) -> Iterator[tuple[str, str]]:
    """A text, and what may differ between runs."""
    if not run.accounts and not run.lost:
        why = "the command's python may ignore PYTHONPATH, or it trains on the host"
        yield "no process used a card" + (f": {why}" if run.exit_status == 0 else " before the command failed"), ""
    for name in run.absent:
        yield f"{name} is not on this machine; lay it out without its weights: {option_for(name)}", ""
    for pid in run.lost:
        yield (
            "a process used a card and left no account: killed or crashed, its memory is not in this",
            f"process {pid}",
        )
    if run.crowd:
        yield (
            f"the command started {run.crowd} processes on fewer cards: --processes {run.crowd} gives each its own",
            "",
        )
    yield from _of_processes(run)
    users = {(account.pid, card.index) for account in run.accounts for card in account.cards}
    for index, count in sorted(Counter(index for _, index in users).items()):
        if count > 1:
            yield f"{count} processes used card {index}, and shared its memory", ""
    for account in run.accounts:
        if account.out_of_memory_count and run.holds(account):
            on = "trained on" if account.stepped_after_oom else "began anew" if account.ended == "exec" else "went on"
            yield (
                f"memory ran out {times(account.out_of_memory_count)}, and the script caught it and {on}",
                account.title,
            )
        off = max((card.phases_off_bytes for card in account.cards), default=0)
        if off:
            yield f"figures by phase may be off by up to {off:,} bytes; the peaks are torch's own", account.title


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _of_processes(run: Run) -> Iterator[tuple[str, str]]:
    """The processes' own notices: one for all that say the same."""
    said: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    places: dict[str, str] = {}
    for account in run.accounts:
        for notice in account.notices:
            titles = said.setdefault(notice.text, [])
            titles += [] if account.title in titles else [account.title]
            counts[notice.text] += notice.count
            if notice.place is not None:
                places.setdefault(notice.text, f"{Path(notice.place.file).name}:{notice.place.line}")
    for text, titles in said.items():
        details = [titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"]
        details += [f"{counts[text]} times"] if counts[text] > len(titles) else []
        details += [f"first at {places[text]}"] if text in places else []
        yield text, ", ".join(details)
