"""Checkpoints while training goes on: a copy to CPU memory, which a thread writes.

Torch's distributed checkpoint sees our state as one-dimensional runs by name, of which each process has some. A process
writes a file of safetensors in one pass, in the layout that torch's HuggingFaceStorageReader reads. Torch's own writer
of that layout makes the bytes of a whole file first. Its other layouts have a metadata file that is a pickle, which we
neither write nor read.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from bigdit import log
from bigdit.checkpoint.folder import (
    LATEST,
    Checkpoint,
    name_of,
    open_checkpoint,
    open_snapshot,
    write_snapshot,
    write_state,
)
from bigdit.checkpoint.peers import Peers
from bigdit.checkpoint.write import Writer
from bigdit.config.run import AVERAGES, CHECKPOINTS
from bigdit.engines import Ema, Engine
from bigdit.engines.state import AVERAGE, Place, places
from bigdit.errors import UserError
from bigdit.files import TEMPORARY, fsync_folder, write_text
from bigdit.units import how_many

_LEAVE_AFTER_S = 60.0
"""Seconds that a failed run waits for the checkpoint that it is writing."""
_AT_ONCE = 1 << 20
"""Weights that are tested together: testing whether they are finite takes several times their bytes."""
_ROOM_FOR_AVERAGES = "make room, raise train.snapshot_every, or choose another output"
_ROOM = "make room for one checkpoint more than train.keep_checkpoints, or choose another output"


@dataclass(frozen=True)
class Keeping:
    """The last `last` checkpoints are kept, and those of steps that `every` divides."""

    last: int
    every: int | None = None


class Saver:
    """Saves to `output`, one checkpoint at a time; all processes make one and call it alike.

    `found`: the checkpoint that the run resumes from; `last`: the newest whole one. The main process's thread calls
    `then` with each whole checkpoint.
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
        self.root, self._averages = output / CHECKPOINTS, output / AVERAGES
        self.last = None if found is None else found.folder
        self._peers = peers
        self._checkpoints = Writer(peers, "checkpoint", write_state, _ROOM)
        self._of_averages = Writer(peers, "snapshot of averages", write_snapshot, _ROOM_FOR_AVERAGES)
        self._keeping = keeping
        before = [] if found is None else found.lineage
        self._snapshots: dict[str, str] = {} if found is None else dict(found.state["snapshots"])
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

    def save(
        self,
        engine: Engine,
        ema: Ema | None,
        step: int,
        described: Mapping[str, Any],
        *,
        whole: bool = True,
        snapshot: bool = False,
    ) -> float:
        """Copy the training state to CPU memory, to be written as the checkpoint of `step`; returns the copy's seconds.

        `snapshot`: the EMA is written as a snapshot before; where not `whole`, it alone. `described`: what state.json
        says besides, as JSON. Waits for the save before, and raises its UserError: it could not be written, or its
        weights are not finite.
        """
        self.wait()
        began = time.perf_counter()
        held = places(engine, ema, self._peers.world.rank)
        copies = {name: _copied(place) for name, place in held.items() if whole or name.startswith(AVERAGE)}
        described = {**described, "step": step, "parameters": {each.name: each.shape for each in engine.shards()}}
        if ema is not None:
            described["updates"] = ema.updates
        self._thread = threading.Thread(target=self._guarded, args=(copies, described, whole, snapshot), daemon=True)
        self._thread.start()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait until what was saved is whole. Raises UserError where it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def _guarded(self, copies: dict[str, Place], state: dict[str, Any], whole: bool, snapshot: bool) -> None:
        try:
            final = (self.root if whole else self._averages) / name_of(state["step"])
            self._peers.agree(_not_finite(copies, final, self.last))
            if snapshot:
                averages = {name: place for name, place in copies.items() if name.startswith(AVERAGE)}
                self._write_snapshot(averages, state)
            if whole:
                self._write(copies, state)
        except BaseException as error:
            self._problem = error

    def _write(self, copies: dict[str, Place], state: dict[str, Any]) -> None:
        final = self.root / name_of(state["step"])
        way = [*self._lineage, state["step"]]
        kept = kept_steps(way, self._keeping.last, self._keeping.every)
        # What is pruned is in the lineage, for the next run to prune if this one is killed before.
        state = state | {"lineage": way, "snapshots": dict(self._snapshots)}
        self._checkpoints.write(final, copies, state, lambda: self._commit(final, way, kept))
        self.last, self._lineage = final, kept
        if self._peers.world.is_main:
            self._then(open_checkpoint(final))

    def _commit(self, final: Path, way: list[int], kept: list[int]) -> None:
        write_text(self.root / LATEST, final.name + "\n")
        prune(self.root, way, kept)

    def _write_snapshot(self, copies: dict[str, Place], state: dict[str, Any]) -> None:
        final = self._averages / name_of(state["step"])
        self._of_averages.write(final, copies, state)
        if self._peers.world.is_main:
            self._snapshots[final.name] = open_snapshot(final).digest


def _copied(place: Place) -> Place:
    return replace(place, tensor=place.tensor.to("cpu", copy=True))


def _count_not_finite(piece: torch.Tensor) -> int:
    # The least and the most are found in one pass, a fiftieth of the time, and NaN is both.
    if not piece.numel() or all(bound.isfinite() for bound in piece.aminmax()):
        return 0
    return int(piece.isfinite().logical_not().sum())


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed run was writing or deleting there: it has no final name. Raises UserError where it
    cannot."""
    for left in folder.glob(f"{TEMPORARY}*"):
        try:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except OSError as error:
            raise UserError(f"cannot remove {left}, which an interrupted run had left: {error.strerror}") from None
        log.notice(f"note: removed {left}, which an interrupted run had left")


def _not_finite(copies: dict[str, Place], final: Path, last: Path | None) -> str | None:
    """What is wrong where weights are not finite: they are not saved."""
    counts = {
        name: sum(map(_count_not_finite, place.tensor.split(_AT_ONCE)))
        for name, place in copies.items()
        if name.startswith(("master.", AVERAGE))
    }
    wrong = {name: count for name, count in counts.items() if count}
    if not wrong:
        return None
    before = f"{last} is the last that is good" if last else "there is none before it"
    return (
        f"NaN or infinity in {how_many(sum(wrong.values()), 'weight')}, the first in "
        f"{next(iter(wrong)).split('.', 1)[1]}: {final} is not written, and {before}; lower "
        "strategy.optimizer.lr, lengthen train.warmup_steps, or set strategy.gradient_clipping"
    )


def kept_steps(lineage: Sequence[int], keep: int, keep_every: int | None) -> list[int]:
    """Of the steps that a run saved, in their order: the last `keep`, and multiples of `keep_every`."""
    return [
        step for i, step in enumerate(lineage) if i >= len(lineage) - keep or (keep_every and step % keep_every == 0)
    ]


def prune(root: Path, lineage: Sequence[int], kept: Sequence[int]) -> None:
    """Delete what the run saved and does not keep. A folder is renamed before, so that none is half there.

    Checkpoints of another lineage stay, such as those after an earlier one that the run went back to.
    """
    for step in sorted(set(lineage) - set(kept)):
        folder = root / name_of(step)
        doomed = root / f"{TEMPORARY}{folder.name}"
        if folder.is_dir():
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            fsync_folder(root)
        shutil.rmtree(doomed, ignore_errors=True)
