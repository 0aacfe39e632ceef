"""Saves checkpoints while training continues: it copies the state to CPU memory, and a thread writes the copy.

For torch's distributed checkpoint the state is one-dimensional slices by name, of which each process has some. Each
process writes one safetensors file in one pass, in the layout that torch's HuggingFaceStorageReader reads. torch's own
writer of that layout needs the bytes of the whole file in memory. torch's other layouts have pickled metadata, which
bigdit neither writes nor reads.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bigdit import log
from bigdit.checkpoint.folder import (
    ENGINE,
    LATEST,
    Checkpoint,
    Peers,
    checksum,
    name_of,
    open_checkpoint,
    open_snapshot,
    write_snapshot,
    write_state,
)
from bigdit.config.run import CHECKPOINTS, EMA_SNAPSHOTS
from bigdit.engines import Ema, Engine
from bigdit.engines.state import EMA, LOCAL, SavedSlice, state_slices
from bigdit.errors import UserError, versions
from bigdit.files import TEMPORARY, commit_folder, fsync, write_text
from bigdit.units import gib, how_many

_LEAVE_AFTER_S = 60.0
"""Seconds that a failed run waits for the checkpoint that it writes."""
_AT_ONCE = 1 << 20
"""Weights that are tested for NaN and infinity together: the test takes several times their bytes."""
_ROOM_FOR_SNAPSHOTS = "make room, raise train.snapshot_every, or choose another output"
_ROOM = "make room for one checkpoint more than train.keep_checkpoints, or choose another output"


@dataclass(frozen=True)
class Keeping:
    """Keep the last `last` checkpoints, and those of multiples of `every` steps."""

    last: int
    every: int | None = None


class Saver:
    """Saves to `output`, one checkpoint at a time; all processes make one and call it.

    `found`: the checkpoint that the run resumes from; `last`: the newest complete one. A thread of the main process
    calls `then` with each complete checkpoint.
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
        self.root, self._ema_snapshots = output / CHECKPOINTS, output / EMA_SNAPSHOTS
        self.last = None if found is None else found.folder
        self._peers = peers
        self._checkpoints = Writer(peers, "checkpoint", write_state, _ROOM)
        self._snapshot_writer = Writer(peers, "snapshot of the EMA", write_snapshot, _ROOM_FOR_SNAPSHOTS)
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

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.wait()
        elif self._thread is not None:  # the run failed, but the thread may still complete a checkpoint
            self._thread.join(_LEAVE_AFTER_S)
            if self._thread.is_alive():
                log.notice("the unfinished checkpoint is discarded: it was not complete after 60 s")

    def save(
        self,
        engine: Engine,
        ema: Ema | None,
        step: int,
        described: Mapping[str, Any],
        *,
        whole: bool = True,
        snapshot: bool = False,
    ) -> None:
        """Copy the training state to CPU memory, and start a thread that writes the checkpoint of `step`.

        `snapshot`: write the EMA as a snapshot too; not `whole`: write only that. `described`: further JSON for
        state.json. Waits for the save before, and raises its UserError if it could not be written, or its weights were
        not finite.
        """
        self.wait()
        held = state_slices(engine, ema, self._peers.world.rank)
        copies = {
            name: replace(place, tensor=place.tensor.to("cpu", copy=True))
            for name, place in held.items()
            if whole or name.startswith(EMA)
        }
        described = {**described, "step": step, "parameters": {each.name: each.shape for each in engine.shards()}}
        if ema is not None:
            described["updates"] = ema.updates
        self._thread = threading.Thread(target=self._guarded, args=(copies, described, whole, snapshot), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save is complete. Raises UserError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def _guarded(self, copies: dict[str, SavedSlice], state: dict[str, Any], whole: bool, snapshot: bool) -> None:
        try:
            final = (self.root if whole else self._ema_snapshots) / name_of(state["step"])
            self._peers.agree(_not_finite(copies, final, self.last))
            if snapshot:
                averages = {name: place for name, place in copies.items() if name.startswith(EMA)}
                self._write_snapshot(averages, state)
            if whole:
                self._write(copies, state)
        except BaseException as error:
            self._problem = error

    def _write(self, copies: dict[str, SavedSlice], state: dict[str, Any]) -> None:
        final = self.root / name_of(state["step"])
        lineage = [*self._lineage, state["step"]]
        kept = kept_steps(lineage, self._keeping.last, self._keeping.every)

        def commit() -> None:
            write_text(self.root / LATEST, final.name + "\n")
            prune(self.root, lineage, kept)

        # The lineage has pruned checkpoints too: the next run prunes them if this one is killed before.
        state = state | {"lineage": lineage, "snapshots": dict(self._snapshots)}
        self._checkpoints.write(final, copies, state, commit)
        self.last, self._lineage = final, kept
        if self._peers.world.is_main:
            self._then(open_checkpoint(final))

    def _write_snapshot(self, copies: dict[str, SavedSlice], state: dict[str, Any]) -> None:
        final = self._ema_snapshots / name_of(state["step"])
        self._snapshot_writer.write(final, copies, state)
        if self._peers.world.is_main:
            self._snapshots[final.name] = open_snapshot(final).digest


def _count_not_finite(piece: torch.Tensor) -> int:
    # The minimum and maximum take one pass, a fiftieth of the time. With a NaN both are NaN.
    if not piece.numel() or all(bound.isfinite() for bound in piece.aminmax()):
        return 0
    return int(piece.isfinite().logical_not().sum())


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files and folders of a killed run. Raises UserError if that fails."""
    for left in folder.glob(f"{TEMPORARY}*"):
        try:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except OSError as error:
            raise UserError(f"cannot remove {left}, which an interrupted run had left: {error.strerror}") from None
        log.notice(f"note: removed {left}, which an interrupted run had left")


def _not_finite(copies: dict[str, SavedSlice], final: Path, last: Path | None) -> str | None:
    """The problem if weights are not finite: then they are not saved."""
    counts = {
        name: sum(map(_count_not_finite, place.tensor.split(_AT_ONCE)))
        for name, place in copies.items()
        if name.startswith(("master.", EMA))
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
    """The steps of a run's saved checkpoints that are kept: the last `keep`, and multiples of `keep_every`."""
    return [
        step for i, step in enumerate(lineage) if i >= len(lineage) - keep or (keep_every and step % keep_every == 0)
    ]


def prune(root: Path, lineage: Sequence[int], kept: Sequence[int]) -> None:
    """Delete the run's checkpoints that are not kept. A folder is renamed before, so that no incomplete one remains.

    Checkpoints of another lineage stay, such as those after an earlier one that the run resumed from.
    """
    for step in sorted(set(lineage) - set(kept)):
        folder = root / name_of(step)
        doomed = root / f"{TEMPORARY}{folder.name}"
        if folder.is_dir():
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            fsync(root)
        shutil.rmtree(doomed, ignore_errors=True)


class SavePlanner(DefaultSavePlanner):
    """Writes each slice once. If several processes have it (HSDP's replicas, numbers), the one with least work
    writes it."""

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(name, place) for name, place in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn].tensor
        return found


def _item(name: str, place: SavedSlice) -> WriteItem:
    offset = torch.Size([place.offset])
    return WriteItem(
        MetadataIndex(name, offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offset, torch.Size([place.tensor.numel()])),
            TensorProperties.create_from_tensor(place.tensor),
            torch.Size([place.numel]),
        ),
    )


OFFSETS = "DCP_SHARDING_INFO"
"""The key under which the reader finds slices' offsets. Source: torch/distributed/checkpoint/_hf_utils.py."""


class ShardFileWriter(StorageWriter):
    """Writes this process's slices to `file`; no file if there are none."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        tensors = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        if tensors:
            offsets = {item.index.fqn: {"saved_offsets": list(item.index.offset or ())} for item in plan.items}
            save_file(tensors, self._file, metadata={"format": "pt", OFFSETS: json.dumps(offsets)})
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: each file describes itself."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


T = TypeVar("T")


class Writer:
    """Writes folders of `kind`, such as `checkpoint`; all processes make one and call it.

    `describe` writes the JSON, on the main process; `room`: advice for a full disk.
    """

    def __init__(self, peers: Peers, kind: str, describe: Callable[[Path, dict[str, Any]], Path], room: str) -> None:
        self._peers, self._kind, self._describe, self._room = peers, kind, describe, room

    def write(
        self, final: Path, copies: dict[str, SavedSlice], state: dict[str, Any], then: Callable[[], None] = lambda: None
    ) -> None:
        """Write `final` from the copies and `state`; then the main process calls `then`. Raises UserError on all
        processes if one cannot write."""
        world, temporary = self._peers.world, final.with_name(f"{TEMPORARY}{final.name}")
        file = temporary / ENGINE / f"rank-{world.rank:05d}-of-{world.world_size:05d}.safetensors"
        self._together(final, lambda: _make(temporary / ENGINE) if world.is_main else None)
        self._together(final, lambda: self._write_shard(copies, file))
        written = [file] if file.exists() else []
        sums = self._together(final, lambda: {str(file.relative_to(temporary)): checksum(file) for file in written})
        local = any(name.startswith(LOCAL) for name in copies)
        of_ranks = self._peers.gather((sums, state["parameters"], local))
        state = state | {
            "saved": datetime.now(UTC).isoformat(),
            "versions": versions(),
            "checksums": {name: digest for each, _, _ in of_ranks for name, digest in each.items()},
            "parameters": {name: shape for _, each, _ in of_ranks for name, shape in each.items()},
            "local": any(each for _, _, each in of_ranks),
        }
        self._together(final, lambda: self._commit(temporary, final, state, then) if world.is_main else None)

    def _write_shard(self, copies: dict[str, SavedSlice], file: Path) -> None:
        dcp.save(
            dict(copies),
            storage_writer=ShardFileWriter(file),
            planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self._peers.group,
            no_dist=self._peers.group is None,
        )

    def _commit(self, temporary: Path, final: Path, state: dict[str, Any], then: Callable[[], None]) -> None:
        described = self._describe(temporary, state)
        for file in (temporary / ENGINE).iterdir():  # safetensors makes files of their owner alone, whatever the umask
            file.chmod(described.stat().st_mode)
        commit_folder(temporary, final)
        then()

    def _together(self, final: Path, action: Callable[[], T]) -> T:
        """The result of `action` here. If it cannot write on one process, all raise UserError."""
        result: T | None = None
        problem = None
        try:
            result = action()
        except (OSError, SafetensorError, UserError, CheckpointException) as error:
            there = final.parent.is_dir()
            free = f"{gib(shutil.disk_usage(final.parent).free)} are free there" if there else "no folder is there"
            why = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            problem = f"cannot write the {self._kind} {final}: {why}; {free}; {self._room}"
        try:
            self._peers.agree(problem)
        except UserError:
            if self._peers.world.is_main:  # on a full disk an incomplete folder takes space
                shutil.rmtree(final.with_name(f"{TEMPORARY}{final.name}"), ignore_errors=True)
            raise
        return result  # type: ignore[return-value]  # None only where the action gives it


def _make(folder: Path) -> None:
    """Make an empty folder; remove what an interrupted save left there."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
