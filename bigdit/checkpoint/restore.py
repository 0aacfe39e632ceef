"""Resume a run from a checkpoint, whichever engine and however many processes saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader

from bigdit import models
from bigdit.catalog.resolve import read_model_config
from bigdit.checkpoint.folder import STATE, Checkpoint, Saved, open_checkpoint
from bigdit.checkpoint.peers import Peers
from bigdit.checkpoint.verify import CHECKSUMS, check_exported, verify
from bigdit.checkpoint.write import LoadPlanner
from bigdit.engines import Ema, Engine
from bigdit.engines.state import AVERAGE, Place, adopt, make_state, places
from bigdit.errors import UserError
from bigdit.models.adapters import FILE as ADAPTERS
from bigdit.strategy import ModelSpec

_RANDOM = "rng."
"""The prefix of generator states in earlier checkpoints of bf16_sr, one a process."""


def restore(checkpoint: Checkpoint, engine: Engine, peers: Peers, ema: Ema | None = None) -> list[str]:
    """Put masters, optimizer state and EMA in place, on all processes; returns notices.

    The files were verified before. Raises UserError where they hold another model's, or another optimizer's state.
    """
    reader = HuggingFaceStorageReader(str(checkpoint.engine))
    saved = reader.read_metadata().state_dict_metadata.keys()
    rank = peers.world.rank
    make_state(engine, saved, rank)
    wanted = places(engine, ema, rank)
    filled = {name: place for name, place in wanted.items() if name in saved}
    for name in sorted(wanted.keys() - saved):
        if name.startswith("state.") and not wanted[name].number:
            wanted[name].tensor.zero_()  # of a parameter that no gradient had come to, in a master of several
        elif not wanted[name].number:
            raise UserError(f"{checkpoint.folder} does not hold {name}: it is of another model or optimizer")
    _load(checkpoint, filled, reader, peers)
    adopt(engine, filled)
    if ema is not None:
        updates = checkpoint.state["updates"]
        ema.updates = checkpoint.step if updates is None else updates  # earlier versions did not count those of a decay
    if not any(name.startswith(_RANDOM) for name in saved):
        return []
    return [
        f"{checkpoint.folder} holds random numbers of an earlier bigdit, which are not taken up: bf16_sr rounds by "
        "train.seed and the step from here on, otherwise than that would have"
    ]


def written_here(source: Path) -> bool:
    """Whether a folder is a checkpoint, or an export with its checksums."""
    return any((source / name).is_file() for name in (STATE, CHECKSUMS))


def check_whole(source: Path) -> None:
    """Raise UserError where a checkpoint or an export holds only LoRA adapters, and no weights to start from."""
    if (source / STATE).is_file():
        state = open_checkpoint(source).state
        if state["strategy"].get("lora") is not None:
            base = state["run"]["model"]["init_from"]
            raise UserError(f"{source} holds LoRA adapters alone; name the weights they are for: {base}")
    elif (source / ADAPTERS).is_file():
        raise UserError(f"{source} holds LoRA adapters alone; name the weights they are for")


def load_model(spec: ModelSpec, source: Path, *, dtype: torch.dtype) -> nn.Module:
    """The model in CPU memory with the weights in `source`, model.init_from: a diffusers folder, or a checkpoint.

    Raises UserError where it holds neither, or is damaged, or is of another model, with the differences.
    """
    try:
        check_whole(source)
        if not (source / STATE).is_file():
            check_exported(source)
            return models.load(spec, source, dtype=dtype)
        found = open_checkpoint(source)
        verify(found)
        model = models.skeleton(spec, dtype=dtype)
        load_weights(found, model)
        return model
    except UserError as error:
        others = _others(spec, source)
        raise UserError(*(f"model.init_from: {problem}{others}" for problem in error.problems)) from None


def _others(spec: ModelSpec, source: Path) -> str:
    """How the model of the weights in `source` differs from this one."""
    try:
        had = open_checkpoint(source).state["model"] if (source / STATE).is_file() else None
        had = had or read_model_config(source / "config.json").model_dump(mode="json")
    except UserError:
        return ""
    if had["class_name"] != spec.class_name:
        return f"; they are of {had['class_name']}"
    here = spec.model_dump(mode="json")["kwargs"]
    others = [f"{key} {each}, here {here[key]}" for key, each in had["kwargs"].items() if here.get(key, each) != each]
    return f"; they have {' and '.join(others[:3])}" if others else ""


@torch.no_grad()
def load_weights(checkpoint: Checkpoint, model: nn.Module, *, average: bool = False) -> None:
    """Fill the trained parameters, of a model with adapters theirs alone, rounded to their dtypes.

    With `average` from the EMA. Raises UserError where the checkpoint is of another model.
    """
    load_kind(checkpoint, AVERAGE if average else "master", trained(model))


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_kind(checkpoint: Saved, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill parameters by name with their saved `master`s or EMAs."""
    load_tensors(checkpoint, {f"{kind}.{name}": tensor for name, tensor in tensors.items()})


def load_tensors(checkpoint: Saved, tensors: dict[str, torch.Tensor]) -> None:
    """Fill whole tensors by the names under which they were saved. Raises UserError where one is missing."""
    wanted = {name: _whole(tensor) for name, tensor in tensors.items()}
    _load(checkpoint, wanted, HuggingFaceStorageReader(str(checkpoint.engine)), Peers())


def _whole(tensor: torch.Tensor) -> Place:
    return Place(tensor.detach().view(-1), 0, tensor.numel())


def _load(checkpoint: Saved, wanted: dict[str, Place], reader: HuggingFaceStorageReader, peers: Peers) -> None:
    try:
        dcp.load(
            dict(wanted),
            storage_reader=reader,
            planner=LoadPlanner(),
            process_group=peers.group,
            no_dist=peers.group is None,
        )
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, KeyboardInterrupt):  # torch makes a failure of it, as of all else
            raise first from None
        raise UserError(f"{checkpoint.folder} cannot be read: {first}") from None
