"""A file of safetensors a process, written in one pass, in the layout that torch's HuggingFaceStorageReader reads.

Torch's own writer of that layout makes the bytes of a whole file first; its metadata file, of the other layouts, is a
pickle, which we neither write nor read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

OFFSETS = "DCP_SHARDING_INFO"
"""Where the reader looks for the place of each run. Source: torch/distributed/checkpoint/_hf_utils.py."""


class ShardFileWriter(StorageWriter):
    """Writes this process's runs to `file`; none where it has nothing to write."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        if tensors:
            offsets = {item.index.fqn: {"saved_offsets": list(item.index.offset or ())} for item in plan.items}
            save_file(tensors, self._file, metadata={"format": "pt", OFFSETS: json.dumps(offsets)})
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: each file says by itself what it holds."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
