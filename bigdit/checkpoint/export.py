"""The weights of a checkpoint in diffusers' format, a file at a time: the model is never whole in memory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from bigdit import log, models
from bigdit.checkpoint.exported import write_checksums
from bigdit.checkpoint.folder import Checkpoint
from bigdit.checkpoint.pipeline import Pipeline
from bigdit.checkpoint.posthoc import PostHoc
from bigdit.checkpoint.restore import load_kind, load_model
from bigdit.engines.state import AVERAGE
from bigdit.errors import UserError
from bigdit.files import commit_folder, filling
from bigdit.spec import LoraSpec, ModelSpec, Strategy

Fill = Callable[[dict[str, torch.Tensor]], None]
"""Fills parameters by name."""

TRANSFORMER = "transformer"
TRANSFORMER_EMA = "transformer_ema"
_FILE = "diffusion_pytorch_model{suffix}.safetensors"  # as diffusers' from_pretrained looks for it
_MOST = "5GB"


def export(
    checkpoint: Checkpoint,
    folder: Path,
    posthoc: PostHoc | None = None,
    pipeline: Pipeline | None = None,
    *,
    replace: bool = True,
) -> None:
    """Write `transformer/`, and `transformer_ema/` where there is an average, to `folder`, whole or not at all; with
    `posthoc` that average, and around them the `pipeline` that is given.

    Weights are fp32; of LoRA they are the adapters, as diffusers' `load_lora_weights` and ComfyUI read them. The
    checkpoint's files were verified before, and no other process writes the folder. Raises UserError where it cannot be
    written, and where it holds anything that is not to be `replace`d.
    """
    try:
        with filling(folder) as temporary:
            _write(checkpoint, posthoc, temporary)
            if pipeline is not None:
                pipeline.write(temporary)
            commit_folder(temporary, folder, replace=replace)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot export to {folder}: {error}") from error


def _write(checkpoint: Checkpoint, posthoc: PostHoc | None, folder: Path) -> None:
    spec = ModelSpec.model_validate(checkpoint.state["model"])
    lora = Strategy.model_validate(checkpoint.state["strategy"]).lora
    average = functools.partial(load_kind, checkpoint, AVERAGE) if posthoc is None else posthoc.fill
    ways: list[tuple[str, Fill]] = [(TRANSFORMER, functools.partial(load_kind, checkpoint, "master"))]
    ways += [(TRANSFORMER_EMA, average)] if checkpoint.has_average else []
    for name, fill in ways:
        (folder / name).mkdir()
        if lora is None:
            _write_model(checkpoint, spec, fill, folder / name)
        else:
            _write_adapters(checkpoint, spec, lora, fill, folder / name)
        write_checksums(folder / name)
    for file in folder.rglob("*.safetensors"):  # safetensors' are their owner's alone, whatever the umask says
        file.chmod(folder.stat().st_mode & 0o666)


def _write_model(checkpoint: Checkpoint, spec: ModelSpec, fill: Fill, folder: Path) -> None:
    shapes = _shapes(checkpoint)
    model = models.skeleton(spec, dtype=torch.float32)
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in shapes}
    described = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()} | buffers
    split = split_torch_state_dict_into_shards(described, filename_pattern=_FILE, max_shard_size=_MOST)
    for file, names in split.filename_to_tensors.items():
        here = {name: torch.empty(shapes[name]) for name in names if name in shapes}
        fill(here)
        here |= {name: buffers[name].contiguous() for name in names if name in buffers}
        save_file(here, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{_FILE.format(suffix='')}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    model.save_config(folder)  # type: ignore[operator]  # of diffusers' ConfigMixin


def _write_adapters(checkpoint: Checkpoint, spec: ModelSpec, lora: LoraSpec, fill: Fill, folder: Path) -> None:
    adapters = {name: torch.empty(shape) for name, shape in _shapes(checkpoint).items()}
    fill(adapters)
    models.save_adapters(folder, lora, adapters)
    source = Path(checkpoint.state["run"]["model"]["init_from"])
    base = functools.partial(load_model, spec, source, dtype=torch.bfloat16)  # bf16 files stay mapped
    try:
        models.save_for_comfyui(folder, spec, lora, adapters, base)
    except UserError as error:
        log.notice(f"note: no LoRA file for ComfyUI is written: {error}")


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in checkpoint.state["parameters"].items()}
