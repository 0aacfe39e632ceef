"""How torch's distributed checkpoint sees our state: one-dimensional runs by name, which each process has some of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bigdit.engines.state import Place
from bigdit.errors import UserError


class SavePlanner(DefaultSavePlanner):
    """Writes each run once, where several processes have it (HSDP's replicas, numbers) by the one with least to do."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_written(name, place) for name, place in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn].tensor
        return found


class LoadPlanner(DefaultLoadPlanner):
    """Fills each run from those that were saved of the same name, however those were cut."""

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
