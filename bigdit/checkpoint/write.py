"""What all processes hold of a state, written to one folder that appears when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from bigdit.checkpoint.folder import ENGINE, checksum
from bigdit.checkpoint.peers import Peers
from bigdit.checkpoint.plan import SavePlanner
from bigdit.checkpoint.shard_file import ShardFileWriter
from bigdit.engines.state import LOCAL, Place
from bigdit.errors import UserError, versions
from bigdit.files import TEMPORARY, commit_folder
from bigdit.units import gib

T = TypeVar("T")


class Writer:
    """Writes folders of `kind`, such as `checkpoint`; all processes make one and call it alike.

    `describe` writes into a folder what its main process is to say of it; `room`: what a person can do on a full disk.
    """

    def __init__(self, peers: Peers, kind: str, describe: Callable[[Path, dict[str, Any]], Path], room: str) -> None:
        self._peers, self._kind, self._describe, self._room = peers, kind, describe, room

    def write(
        self, final: Path, copies: dict[str, Place], state: dict[str, Any], then: Callable[[], None] = lambda: None
    ) -> None:
        """Make `final` of them and of `state`; once it is there, the main process calls `then`. Raises UserError on
        all processes where one cannot write."""
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
        """What `action` gives here. Where it cannot write on one process, all raise UserError."""
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
    """An empty folder, whatever an interrupted save left there."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointException):
        return str(next(iter(error.failures.values()))[0])
    return str(error)
