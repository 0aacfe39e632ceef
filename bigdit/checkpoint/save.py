"""Write a checkpoint so that it is whole or not there, and take a run up from one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from bigdit import models
from bigdit.checkpoint.folder import (
    CHECKPOINTS,
    ENGINE,
    LATEST,
    STATE,
    TRANSFORMER,
    TRANSFORMER_EMA,
    Checkpoint,
    checksum,
)
from bigdit.dist import World
from bigdit.engines import Ema, Engine
from bigdit.engines.state import load_local_state, local_state
from bigdit.errors import UserError, versions
from bigdit.files import TEMPORARY, commit_folder, write_json, write_text
from bigdit.spec import ModelSpec


def save(
    output: Path,
    engine: Engine,
    model: nn.Module,
    spec: ModelSpec,
    *,
    ema: Ema | None = None,
    step: int,
    run: dict[str, Any],
    data: dict[str, Any] | None = None,
    world: World,
    keep: int,
) -> Path:
    """Write the checkpoint of `step`, move `latest` to it and keep the `keep` newest. All processes call this.

    `model` is the plain module that the engine trains, for its diffusers config; `run` the run's config, and
    `data` the state of its data, as JSON. Raises UserError where the output cannot be written.
    """
    root = output / CHECKPOINTS
    name = f"step-{step:08d}"
    temporary = root / f"{TEMPORARY}{name}"
    try:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / ENGINE).mkdir(parents=True)
        _barrier(world)
        shard = Checkpoint(temporary, {}).shard(world.rank, world.world_size)
        save_file(local_state(engine) | ({} if ema is None else ema.local_state()), shard)
        _write_transformer(temporary / TRANSFORMER, engine, model, world)
        if ema is not None:
            with ema.in_place_of_weights():
                _write_transformer(temporary / TRANSFORMER_EMA, engine, model, world)
        _barrier(world)
        if world.is_main:
            files = sorted(file for file in temporary.rglob("*") if file.is_file())
            state = {
                "step": step,
                "model": spec.model_dump(mode="json"),
                "strategy": engine.strategy.model_dump(mode="json"),
                "run": run,
                "data": data,
                "versions": versions(),
                "checksums": {str(file.relative_to(temporary)): checksum(file) for file in files},
            }
            write_json(temporary / STATE, state)
            for file in files:  # safetensors makes files that only their owner reads, whatever the umask says
                file.chmod((temporary / STATE).stat().st_mode)
            commit_folder(temporary, root / name)
            write_text(root / LATEST, name + "\n")
            _prune(root, keep)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the checkpoint {root / name}: {error}") from error
    _barrier(world)
    return root / name


def restore(checkpoint: Checkpoint, engine: Engine, world: World, ema: Ema | None = None) -> None:
    """Put this process's masters, optimizer state and average back. Raises UserError where the file is damaged."""
    shard = checkpoint.shard(world.rank, world.world_size)
    checkpoint.verify(shard)
    tensors = load_file(shard)
    load_local_state(engine, tensors)
    if ema is not None:
        ema.load_local_state(tensors)


def _write_transformer(folder: Path, engine: Engine, model: nn.Module, world: World) -> None:
    """Gather the weights, parameter by parameter, and write them on the main process in diffusers' format."""
    weights = {name: tensor for name, tensor in engine.full_weights() if world.is_main}
    if not world.is_main:
        return
    if engine.strategy.lora is not None:
        models.save_adapters(folder, engine.strategy.lora, weights.items())
        return
    buffers = {name: tensor.cpu() for name, tensor in model.state_dict().items() if name not in weights}
    model.save_config(folder)  # type: ignore[operator]  # of diffusers' ConfigMixin
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    save_torch_state_dict(weights | buffers, folder, filename_pattern=pattern, max_shard_size="10GB")


def _prune(root: Path, keep: int) -> None:
    whole = sorted(path for path in root.iterdir() if re.fullmatch(r"step-\d{8}", path.name))
    for old in whole[:-keep]:
        shutil.rmtree(old)


def _barrier(world: World) -> None:
    if world.world_size > 1:
        torch.distributed.barrier()
