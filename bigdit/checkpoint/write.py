"""What all processes hold of a state, written to one folder that appears when it is whole.

Torch's distributed checkpoint sees our state as one-dimensional runs by name, which each process has some of. A process
writes a file of safetensors in one pass, in the layout that torch's HuggingFaceStorageReader reads. Torch's own writer
of that layout makes the bytes of a whole file first; its metadata file, of the other layouts, is a pickle, which we
neither write nor read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bigdit.checkpoint.folder import ENGINE, checksum
from bigdit.checkpoint.peers import Peers
from bigdit.engines.state import LOCAL, Place
from bigdit.errors import UserError, versions
from bigdit.files import TEMPORARY, commit_folder
from bigdit.units import gib


class SavePlanner(DefaultSavePlanner):
    """Writes each run once. Of several processes that have it (HSDP's replicas, numbers) the one with least work
    does."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_written(name, place) for name, place in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn].tensor
        return found


class LoadPlanner(DefaultLoadPlanner):
    """Fills each run from the saved runs of the same name, however those were cut."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, place in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            found = saved.size[0] if isinstance(saved, TensorStorageMetadata) else 0
            if found != place.numel:
                raise UserError(f"it holds {found} elements of {name}, and this run has {place.numel}")
            wanted = ChunkStorageMetadata(torch.Size([place.offset]), torch.Size([place.tensor.numel()]))
            parts = create_read_items_for_chunk_list(name, saved, [wanted])  # type: ignore[arg-type]  # has elements
            if sum(part.lengths[0] for part in parts) != place.tensor.numel():
                raise UserError(f"some of the {found} elements of {name} are in none of its files")
            items += parts
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn].tensor
        return found


def _written(name: str, place: Place) -> WriteItem:
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
"""Where the reader looks for the offset of each run. Source: torch/distributed/checkpoint/_hf_utils.py."""


class ShardFileWriter(StorageWriter):
    """Writes this process's runs to `file`; no file where there is nothing to write."""

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
    """Writes folders of `kind`, such as `checkpoint`; all processes make one and call it alike.

    `describe` writes the main process's JSON into a folder; `room`: what a person can do on a full disk.
    """

    def __init__(self, peers: Peers, kind: str, describe: Callable[[Path, dict[str, Any]], Path], room: str) -> None:
        self._peers, self._kind, self._describe, self._room = peers, kind, describe, room

    def write(
        self, final: Path, copies: dict[str, Place], state: dict[str, Any], then: Callable[[], None] = lambda: None
    ) -> None:
        """Make `final` from the copies and `state`; once it is there, the main process calls `then`. Raises UserError
        on all processes where one cannot write."""
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

    def _write_shard(self, copies: dict[str, Place], file: Path) -> None:
        dcp.save(
            dict(copies),
            storage_writer=ShardFileWriter(file),
            planner=SavePlanner(),
            process_group=self._peers.group,
            no_dist=self._peers.group is None,
        )

    def _commit(self, temporary: Path, final: Path, state: dict[str, Any], then: Callable[[], None]) -> None:
        described = self._describe(temporary, state)
        for file in (temporary / ENGINE).iterdir():  # safetensors' are their owner's alone, whatever the umask says
            file.chmod(described.stat().st_mode)
        commit_folder(temporary, final)
        then()

    def _together(self, final: Path, action: Callable[[], T]) -> T:
        """What `action` returns here. Where it cannot write on one process, all raise UserError."""
        result: T | None = None
        problem = None
        try:
            result = action()
        except (OSError, SafetensorError, UserError, CheckpointException) as error:
            free = gib(shutil.disk_usage(final.parent).free) if final.parent.is_dir() else "nothing"
            problem = f"cannot write the {self._kind} {final}: {_reason(error)}; {free} are free there; {self._room}"
        try:
            self._peers.agree(problem)
        except UserError:
            if self._peers.world.is_main:  # on a full disk what is half written takes room from all else
                shutil.rmtree(final.with_name(f"{TEMPORARY}{final.name}"), ignore_errors=True)
            raise
        return result  # type: ignore[return-value]  # None only where the action gives it


def _make(folder: Path) -> None:
    """Make an empty folder, whatever an interrupted save left there."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointException):
        return str(next(iter(error.failures.values()))[0])
    return str(error)
