"""The result of an emulated command: its runs, the memory of each process on its GPU, and notices.

The account of each process (`inside/account.py` writes it) is not trusted, since the process runs a user's code. Its
form is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from bigdit.catalog import Gpu
from bigdit.emulator.fake_weights import option_for
from bigdit.memory.process import ByteRange, non_torch_memory
from bigdit.strategy import Strict

MOST_BYTES = 64 * 2**20
"""The limit of an account. One with 2,000 points and 40 groups has less than a megabyte."""

Name = Annotated[str, Field(max_length=4096)]
PhaseName = Literal["start", "forward", "backward", "step"]


class CodeLine(Strict):
    """A line of python. `own`: it is the script's, not an installed library's."""

    file: Name
    line: NonNegativeInt
    name: Name
    code: Name
    own: bool


class TensorGroup(Strict):
    """Allocated tensors that the same lines made in the same phase: their number and their blocks' bytes.

    `script`: the script's innermost line; `library`: a library's innermost line within it. The last group of a list may
    be the rest, without a phase.
    """

    script: CodeLine | None
    library: CodeLine | None
    phase: PhaseName | None
    nbytes: NonNegativeInt
    count: PositiveInt


class PhasePeaks(Strict):
    """The peaks of allocated and reserved bytes in a phase, over all steps."""

    phase: PhaseName
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt


class PhaseSpan(Strict):
    """The begin of a phase, as a number of allocator events."""

    phase: PhaseName
    start: NonNegativeInt


class GpuAccount(Strict):
    """The memory of a process on one GPU. `curve`: event, allocated and reserved bytes after it; the highest of each
    stretch. `phases_off_bytes`: the difference of the replay by phase to torch's own figures."""

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
    spans: Annotated[tuple[PhaseSpan, ...], Field(max_length=4000)]
    events: NonNegativeInt
    curve: Annotated[tuple[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt], ...], Field(max_length=2000)]
    tensors: Annotated[tuple[TensorGroup, ...], Field(max_length=64)]


class EmulatedOom(Strict):
    """An out-of-memory error: requested and free bytes, and the stack, innermost first."""

    gpu: NonNegativeInt
    asked_bytes: NonNegativeInt
    free_bytes: NonNegativeInt
    total_bytes: NonNegativeInt
    allocated_bytes: NonNegativeInt
    phase: PhaseName
    steps: NonNegativeInt
    frames: Annotated[tuple[CodeLine, ...], Field(max_length=64)]
    tensors: Annotated[tuple[TensorGroup, ...], Field(max_length=64)]


class Uncaught(Strict):
    """The exception that ended the process, with its stack, innermost first."""

    type: Name
    text: Name
    out_of_memory: bool
    frames: Annotated[tuple[CodeLine, ...], Field(max_length=64)]


class Notice(Strict):
    """A notice for readers of the figures, its count, and the first line of the script where it happened."""

    text: Name
    count: PositiveInt
    place: CodeLine | None


class Account(Strict):
    """One process that used a GPU. `node`: the number of its machine."""

    pid: PositiveInt
    rank: NonNegativeInt | None
    node: NonNegativeInt = 0
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
    gpus: Annotated[tuple[GpuAccount, ...], Field(max_length=64)]
    out_of_memory: Annotated[tuple[EmulatedOom, ...], Field(max_length=32)]
    out_of_memory_count: NonNegativeInt
    work: dict[str, int]
    work_by_step: Annotated[tuple[dict[str, int], ...], Field(max_length=1000)]
    notices: Annotated[tuple[Notice, ...], Field(max_length=100)]

    def fits(self, ended_well: bool) -> bool:
        """Whether memory never ran out, or the script caught the error and continued.

        A training continued if it stepped later. Another program continued if it computed or restarted later, and its
        command `ended_well`.
        """
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
    """The account in a file; None if it is none."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        return Account.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


EXIT_DOES_NOT_FIT = 2
EXIT_FAILED = 1
"""Replaces a command's own status 2, which would look like EXIT_DOES_NOT_FIT, and 0 without an answer."""


class EmulatedRun(Strict):
    """One run of the command. `lost`: processes that used a GPU and left no account. `crowd`: the number of processes
    that it started on this machine, if larger than the number of GPUs, else 0. `absent`: the hub's repositories that
    processes lacked."""

    first_step_skipped: bool
    exit_status: NonNegativeInt
    seconds: NonNegativeFloat
    accounts: tuple[Account, ...]
    lost: tuple[NonNegativeInt, ...]
    crowd: NonNegativeInt
    absent: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """None if it is unknown: the command failed, or no process used a GPU."""
        if not all(map(self.holds, self.accounts)):
            return False
        return True if self.accounts and self.exit_status == 0 else None

    def holds(self, account: Account) -> bool:
        """Whether memory never ran out in this process, or it continued."""
        return account.fits(self.exit_status == 0)

    def shortage(self, account: Account) -> EmulatedOom | None:
        """The out-of-memory error that ended this process, if any."""
        return None if self.holds(account) else next(reversed(account.out_of_memory), None)

    @property
    def out_of_memory_count(self) -> int:
        return sum(account.out_of_memory_count for account in self.accounts)

    @property
    def scales_loss(self) -> bool:
        return any(account.loss_scaler for account in self.accounts)

    @property
    def highest(self) -> tuple[Account, GpuAccount] | None:
        """The process and GPU with the most reserved memory; first of all one that ran out of memory."""
        found = [(account, gpu) for account in self.accounts for gpu in account.gpus]
        return max(found, key=lambda each: (not self.holds(each[0]), each[1].peak_reserved_bytes), default=None)


class Emulation(Strict):
    """A command on `nodes` machines of `gpus` GPUs. If it scales its loss, a second run skips the first step."""

    command: tuple[str, ...]
    gpu: Gpu
    gpus: PositiveInt
    nodes: PositiveInt = 1
    runs: tuple[EmulatedRun, ...]

    @property
    def decisive(self) -> EmulatedRun:
        """The run that decides: one that does not fit, else one without an answer."""
        return min(self.runs, key=lambda run: (False, None, True).index(run.fits))

    @property
    def fits(self) -> bool | None:
        return self.decisive.fits

    @property
    def exit_status(self) -> int:
        """0 if it fits; 2 if a process ran out of memory and did not continue; else the command's own, or 1."""
        if self.fits is False:
            return EXIT_DOES_NOT_FIT
        own = next((run.exit_status for run in self.runs if run.exit_status), 0)
        return EXIT_FAILED if own == EXIT_DOES_NOT_FIT or (own == 0 and self.fits is None) else own

    def process(self, account: Account, gpu: GpuAccount) -> ByteRange:
        """The memory of a process at its peak in nvidia-smi: reserved memory, CUDA context and NCCL."""
        reserved = ByteRange(low_bytes=gpu.peak_reserved_bytes, high_bytes=gpu.peak_reserved_bytes)
        return reserved + self.non_torch(account)

    def non_torch(self, account: Account) -> ByteRange:
        """The non-torch memory of a process: CUDA context and NCCL."""
        return non_torch_memory(self.gpu, account.world_size)

    @property
    def notices(self) -> list[str]:
        """The notices, one line each; of a second run only new ones."""
        found: dict[str, str] = {}
        for run in self.runs:
            of = "with the first step skipped, " if run.first_step_skipped else ""
            for text, details in _notices(run):
                found.setdefault(text, of + (f"{text} ({details})" if details else text))
        return list(found.values())


def _notices(run: EmulatedRun) -> Iterator[tuple[str, str]]:
    """Yields each text, and details that may differ between runs."""
    if not run.accounts and not run.lost:
        why = "the command's python may ignore PYTHONPATH, or it trains on the CPU"
        yield "no process used a GPU" + (f": {why}" if run.exit_status == 0 else " before the command failed"), ""
    for name in run.absent:
        yield f"{name} is not on this machine; give it fake weights: {option_for(name)}", ""
    for pid in run.lost:
        yield (
            "a process used a GPU and left no account: it was killed or crashed, and its memory is missing here",
            f"process {pid}",
        )
    if run.crowd:
        yield (
            f"the command started {run.crowd} processes on fewer GPUs; --processes {run.crowd} gives each its own",
            "",
        )
    yield from _of_processes(run)
    users = {(account.pid, account.node, gpu.index) for account in run.accounts for gpu in account.gpus}
    for (_, index), count in sorted(Counter((node, index) for _, node, index in users).items()):
        if count > 1:
            yield f"{count} processes used GPU {index}, and shared its memory", ""
    for account in run.accounts:
        if account.out_of_memory_count and run.holds(account):
            on = "stepped" if account.stepped_after_oom else "restarted" if account.ended == "exec" else "continued"
            yield (
                f"memory ran out {times(account.out_of_memory_count)}, and the script caught it and {on}",
                account.title,
            )
        off = max((gpu.phases_off_bytes for gpu in account.gpus), default=0)
        if off:
            yield f"figures by phase may be wrong by up to {off:,} bytes; the peaks are torch's own", account.title


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _of_processes(run: EmulatedRun) -> Iterator[tuple[str, str]]:
    """The processes' own notices. Equal ones are merged."""
    processes: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    places: dict[str, str] = {}
    for account in run.accounts:
        for notice in account.notices:
            titles = processes.setdefault(notice.text, [])
            titles += [] if account.title in titles else [account.title]
            counts[notice.text] += notice.count
            if notice.place is not None:
                places.setdefault(notice.text, f"{Path(notice.place.file).name}:{notice.place.line}")
    for text, titles in processes.items():
        details = [titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"]
        details += [f"{counts[text]} times"] if counts[text] > len(titles) else []
        details += [f"first at {places[text]}"] if text in places else []
        yield text, ", ".join(details)
