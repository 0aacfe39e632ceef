"""Checkpoints while training goes on: a copy to the host, then a thread that writes it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from bigdit import log
from bigdit.checkpoint.folder import (
    ENGINE,
    LATEST,
    STATE,
    Checkpoint,
    checksum,
    name_of,
    open_checkpoint,
    write_state,
)
from bigdit.checkpoint.peers import Peers
from bigdit.checkpoint.plan import SavePlanner
from bigdit.checkpoint.prune import kept_steps, prune
from bigdit.checkpoint.shard_file import ShardFileWriter
from bigdit.config.output import CHECKPOINTS
from bigdit.engines import Ema, Engine
from bigdit.engines.state import LOCAL, Place, places
from bigdit.errors import UserError, versions
from bigdit.files import TEMPORARY, commit_folder, write_text
from bigdit.units import gib

T = TypeVar("T")

_LEAVE_AFTER_S = 60.0
"""How long a run that failed waits for the checkpoint that it was writing."""
_AT_ONCE = 1 << 20
"""Weights that are looked at together: asking whether they are finite takes several times their bytes."""
_ROOM = "make room for one checkpoint more than train.keep_checkpoints, or choose another output"


@dataclass(frozen=True)
class Keeping:
    """The last `last` checkpoints stay, and those of steps that `every` divides."""

    last: int
    every: int | None = None


class Saver:
    """Saves to `output`, one checkpoint at a time; all processes make one and call it alike.

    `found` is the checkpoint that the run goes on from; `last` the newest that is whole. `then` is called with each
    that is whole, on the main process, in the thread.
    """

    def __init__(
        self,
        output: Path,
        peers: Peers,
        keeping: Keeping,
        *,
        found: Checkpoint | None = None,
        then: Callable[[Checkpoint], None] = lambda _: None,
    ) -> None:
        self.root = output / CHECKPOINTS
        self.last = None if found is None else found.folder
        self._peers = peers
        self._keeping = keeping
        before = [] if found is None else found.lineage
        self._lineage = [step for step in before if (self.root / name_of(step)).is_dir()]
        self._then = then
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        if peers.world.is_main:
            remove_unfinished(self.root)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:  # the run has failed: what is being written may yet become whole
            self._thread.join(_LEAVE_AFTER_S)
            if self._thread.is_alive():
                log.notice("the checkpoint that was being written is given up: it was not whole after 60 s")

    def save(self, engine: Engine, ema: Ema | None, step: int, described: Mapping[str, Any]) -> float:
        """Copy the training state to the host and have it written as the checkpoint of `step`; the copy's seconds.

        `described` is what state.json says beside it, as JSON. Waits for the checkpoint before, whose UserError it
        raises: it cannot be written, or its weights are not finite.
        """
        self.wait()
        began = time.perf_counter()
        held = places(engine, ema, self._peers.world.rank)
        copies = {name: _copied(place) for name, place in held.items()}
        described = {**described, "step": step, "parameters": {each.name: each.shape for each in engine.shards()}}
        self._thread = threading.Thread(target=self._guarded, args=(copies, described), daemon=True)
        self._thread.start()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Until what was saved is whole. Raises UserError where it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def _guarded(self, copies: dict[str, Place], state: dict[str, Any]) -> None:
        try:
            self._write(copies, state)
        except BaseException as error:
            self._problem = error

    def _write(self, copies: dict[str, Place], state: dict[str, Any]) -> None:
        world, final = self._peers.world, self.root / name_of(state["step"])
        temporary = self.root / f"{TEMPORARY}{final.name}"
        file = temporary / ENGINE / f"rank-{world.rank:05d}-of-{world.world_size:05d}.safetensors"
        self._peers.agree(_not_finite(copies, final, self.last))
        self._together(final, lambda: _make(temporary / ENGINE) if world.is_main else None)
        self._together(final, lambda: self._write_shard(copies, file))
        written = [file] if file.exists() else []
        sums = self._together(final, lambda: {str(file.relative_to(temporary)): checksum(file) for file in written})
        local = any(name.startswith(LOCAL) for name in copies)
        of_ranks = self._peers.gather((sums, state["parameters"], local))
        way = [*self._lineage, state["step"]]
        kept = kept_steps(way, self._keeping.last, self._keeping.every)
        state |= {
            "lineage": way,  # what is pruned below is in it, for the next run to prune if this one is killed before
            "saved": datetime.now(UTC).isoformat(),
            "versions": versions(),
            "checksums": {name: digest for each, _, _ in of_ranks for name, digest in each.items()},
            "parameters": {name: shape for _, each, _ in of_ranks for name, shape in each.items()},
            "local": any(each for _, _, each in of_ranks),
        }
        self._together(final, lambda: self._commit(temporary, final, state, way, kept) if world.is_main else None)
        self.last, self._lineage = final, kept
        if world.is_main:
            self._then(open_checkpoint(final))

    def _write_shard(self, copies: dict[str, Place], file: Path) -> None:
        dcp.save(
            dict(copies),
            storage_writer=ShardFileWriter(file),
            planner=SavePlanner(),
            process_group=self._peers.group,
            no_dist=self._peers.group is None,
        )

    def _commit(self, temporary: Path, final: Path, state: dict[str, Any], way: list[int], kept: list[int]) -> None:
        write_state(temporary, state)
        for file in (temporary / ENGINE).iterdir():  # safetensors' are their owner's alone, whatever the umask says
            file.chmod((temporary / STATE).stat().st_mode)
        commit_folder(temporary, final)
        write_text(self.root / LATEST, final.name + "\n")
        prune(self.root, way, kept)

    def _together(self, final: Path, action: Callable[[], T]) -> T:
        """What `action` gives here. Where it cannot write on one process, all raise UserError."""
        result: T | None = None
        problem = None
        try:
            result = action()
        except (OSError, SafetensorError, UserError, CheckpointException) as error:
            free = gib(shutil.disk_usage(self.root).free) if self.root.is_dir() else "nothing"
            problem = f"cannot write the checkpoint {final}: {_reason(error)}; {free} are free there; {_ROOM}"
        try:
            self._peers.agree(problem)
        except UserError:
            if self._peers.world.is_main:  # on a full disk what is half written takes room from all else
                shutil.rmtree(final.with_name(f"{TEMPORARY}{final.name}"), ignore_errors=True)
            raise
        return result  # type: ignore[return-value]  # None only where the action gives it


def _copied(place: Place) -> Place:
    return replace(place, tensor=place.tensor.to("cpu", copy=True))


def _count_not_finite(piece: torch.Tensor) -> int:
    # The least and the most are found in one pass, a fiftieth of the time, and NaN is both.
    if not piece.numel() or all(bound.isfinite() for bound in piece.aminmax()):
        return 0
    return int(piece.isfinite().logical_not().sum())


def remove_unfinished(folder: Path) -> None:
    """Take away what was being written or deleted there when an earlier run was killed: it has no final name.

    Raises UserError where it cannot.
    """
    for left in folder.glob(f"{TEMPORARY}*"):
        try:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except OSError as error:
            raise UserError(f"cannot remove {left}, which an interrupted run had left: {error.strerror}") from None
        log.notice(f"note: removed {left}, which an interrupted run had left")


def _make(folder: Path) -> None:
    """An empty folder, whatever an interrupted save left there."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)


def _not_finite(copies: dict[str, Place], final: Path, last: Path | None) -> str | None:
    """What is wrong with weights that are not finite: they are not saved."""
    counts = {
        name: sum(map(_count_not_finite, place.tensor.split(_AT_ONCE)))
        for name, place in copies.items()
        if name.startswith(("master.", "ema."))
    }
    wrong = {name: count for name, count in counts.items() if count}
    if not wrong:
        return None
    before = f"{last} is the last that is good" if last else "there is none before it"
    return (
        f"{sum(wrong.values())} weights are not finite, the first in {next(iter(wrong)).split('.', 1)[1]}: {final} is "
        f"not written, and {before}; lower optimizer.lr, lengthen train.warmup_steps, or set train.gradient_clipping"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointException):
        return str(next(iter(error.failures.values()))[0])
    return str(error)
