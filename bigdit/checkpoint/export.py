"""Exports a checkpoint's weights in diffusers' format, with one file in memory at a time.

Computes EMAs of other widths after the run, from saved ones (Karras et al., arXiv:2312.02696).
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from bigdit import log, models
from bigdit.catalog.families import CONTROLNET
from bigdit.checkpoint.card import FILE as CARD
from bigdit.checkpoint.card import card
from bigdit.checkpoint.folder import Checkpoint, Saved, snapshots_of, verify, write_checksums
from bigdit.checkpoint.pipeline import Pipeline
from bigdit.checkpoint.restore import few_at_once, load_kind, load_model, load_tensors, load_used, trained
from bigdit.checkpoint.single_file import Kind, write_single_file
from bigdit.engines.ema import exponent
from bigdit.engines.state import EMA, ema_kind
from bigdit.errors import UserError
from bigdit.files import cannot_write, commit_folder, filling
from bigdit.strategy import EmaSpec, LoraSpec, ModelSpec, Strategy

MOST_ERROR = 0.05
"""The largest error of a post-hoc EMA's profile, as a share of the requested profile's length."""


class PostHoc:
    """The EMA of `width` at a checkpoint's step, from its own EMAs and its run's snapshots.

    `error`: of its profile, as a share of the requested profile's length; `message` has it in words. All files are
    verified. Raises UserError if there are no snapshots, or the error is too large.
    """

    def __init__(self, checkpoint: Checkpoint, width: float) -> None:
        ema = EmaSpec.model_validate(checkpoint.state["strategy"].get("ema") or {})
        if not 0 < width < 0.288:
            raise UserError(f"--ema-width is {width:g}, and a number above 0 and below 0.288 was expected")
        if not checkpoint.has_ema or ema.widths is None:
            has = f"an EMA with strategy.{ema.profile}" if checkpoint.has_ema else "no EMA"
            raise UserError(f"--ema-width: {checkpoint.folder} holds {has}; train with strategy.ema.widths")
        saved = (*snapshots_of(checkpoint), checkpoint)
        # One for each number of updates; 0 updates if all steps were skipped.
        self._kept: list[Saved] = list({n: each for each in saved if (n := each.state["updates"])}.values())
        if len(self._kept) < 2:
            raise UserError(
                f"--ema-width: {checkpoint.folder} has no EMA snapshots before it; train with train.snapshot_every"
            )
        self._count = ema.count
        profiles = [(each.state["updates"], own) for each in self._kept for own in ema.widths]
        found, self.error = coefficients(profiles, (checkpoint.state["updates"], width))
        self._shares = found.reshape(len(self._kept), ema.count).tolist()
        self.message = (
            f"the EMA of width {width:g} from {len(profiles)} others: the error of its profile is {self.error:.1%}"
        )
        if self.error > MOST_ERROR:
            raise UserError(
                f"--ema-width: {self.message}, and {MOST_ERROR:.0%} is the most; widths near {ema.profile} are closer, "
                "and so are all with a smaller train.snapshot_every"
            )
        for each in self._kept:
            verify(each)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill parameters by name with sums in fp64, few at a time."""
        for names in few_at_once(tensors):
            sums = {name: torch.zeros(tensors[name].shape, dtype=torch.float64) for name in names}
            for each, shares in zip(self._kept, self._shares, strict=True):
                kinds = [ema_kind(i) for i in range(self._count)]
                read = {f"{kind}.{name}": torch.empty(tensors[name].shape) for kind in kinds for name in names}
                load_tensors(each, read)
                for kind, share in zip(kinds, shares, strict=True):
                    for name in names:
                        sums[name].add_(read[f"{kind}.{name}"], alpha=share)
            for name in names:
                tensors[name].copy_(sums[name])

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Fill the trained parameters (with adapters only theirs), rounded to their dtypes."""
        self.fill(trained(model))


Array = npt.NDArray[np.float64]
_LEAST = 1e-12
"""The smallest singular value, as a share of the largest. Smaller ones are rounding errors of close snapshots."""


def coefficients(kept: Sequence[tuple[int, float]], wanted: tuple[int, float]) -> tuple[Array, float]:
    """The coefficients of EMAs whose sum is the wanted EMA, and the error of its profile as a share of its length.

    EMAs are given as (updates, width). The coefficients sum to one, so that constant weights do not change.
    """
    steps, widths = np.array(kept, dtype=np.float64).T
    exponents = np.array([exponent(width) for width in widths])
    end, last = float(wanted[0]), exponent(wanted[1])
    among = _product(steps[:, None], exponents[:, None], steps, exponents)
    against, own = _product(steps, exponents, end, last), float(_product(end, last, end, last))
    lengths = np.sqrt(np.diag(among))  # profiles of early steps are high: divide all by their lengths
    found = np.linalg.lstsq(among / np.outer(lengths, lengths), against / lengths, rcond=_LEAST)[0] / lengths
    found = found / found.sum()
    return found, float(np.sqrt(max(found @ among @ found - 2 * found @ against + own, 0.0) / own))


def _product(steps: Any, exponents: Any, others: Any, theirs: Any) -> Array:
    """The integral of the product of two profiles, over the steps that both have (ibid., appendix C).

    It uses logarithms: t^γ of a narrow profile overflows.
    """
    shared = np.log(np.minimum(steps, others))
    grown = (exponents + theirs + 1) * shared - (exponents + 1) * np.log(steps) - (theirs + 1) * np.log(others)
    product: Array = (exponents + 1) * (theirs + 1) / (exponents + theirs + 1) * np.exp(grown)
    return product


Fill = Callable[[dict[str, torch.Tensor]], None]
"""Fills parameters by name."""

TRANSFORMER = "transformer"
SINGLE_FILE = "single_file"
_FILE = "diffusion_pytorch_model{suffix}.safetensors"  # as diffusers' from_pretrained looks for it
_MOST = "5GB"


def export(
    checkpoint: Checkpoint,
    folder: Path,
    posthoc: PostHoc | None = None,
    pipeline: Pipeline | None = None,
    *,
    single_file: Kind | None = None,
    replace: bool = True,
) -> None:
    """Write a verified checkpoint to `folder`, all or nothing, with a model card as README.md.

    `transformer/` (`controlnet/` for a ControlNet) has fp32 weights, or LoRA adapters in the formats of diffusers'
    `load_lora_weights` and ComfyUI. `transformer_ema/` has the EMA, or `posthoc`. With `single_file`, a folder of that
    name has each model in one file. `pipeline`: its other parts are written too. No other process may write the folder.
    Raises UserError if it cannot be written, or has content and not `replace`.
    """
    pieces = [] if single_file is None else _pieces(checkpoint)
    try:
        with filling(folder) as temporary:
            fills = _fills(checkpoint, posthoc)
            _write(checkpoint, fills, temporary)
            if single_file is not None:
                _write_single_files(checkpoint, fills, single_file, pieces, temporary / SINGLE_FILE)
            if pipeline is not None:
                pipeline.write(temporary)
            (temporary / CARD).write_text(card(checkpoint))
            commit_folder(temporary, folder, replace=replace)
    except (OSError, SafetensorError, UserError) as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        if isinstance(cause, SafetensorError):  # it has a text alone
            full = _FULL in str(cause)
            cause = OSError(errno.ENOSPC, _FULL) if full else OSError(str(cause))
        if not isinstance(cause, OSError):
            raise
        raise cannot_write(folder, cause, "cannot export to") from error


_FULL = os.strerror(errno.ENOSPC)


def _fills(checkpoint: Checkpoint, posthoc: PostHoc | None) -> list[tuple[str, Fill]]:
    """The folders of weights, and the functions that fill their tensors."""
    average = functools.partial(load_kind, checkpoint, EMA) if posthoc is None else posthoc.fill
    name = TRANSFORMER if checkpoint.state["strategy"].get("controlnet") is None else CONTROLNET
    fills: list[tuple[str, Fill]] = [(name, functools.partial(load_used, checkpoint))]
    return fills + ([(f"{name}_ema", average)] if checkpoint.has_ema else [])


def _write(checkpoint: Checkpoint, fills: Sequence[tuple[str, Fill]], folder: Path) -> None:
    spec = ModelSpec.model_validate(checkpoint.state["model"])
    strategy = Strategy.model_validate(checkpoint.state["strategy"])
    for name, fill in fills:
        (folder / name).mkdir()
        if strategy.lora is not None:
            _write_adapters(checkpoint, spec, strategy.lora, fill, folder / name)
        elif strategy.controlnet is not None:
            model = models.controlnet(spec, strategy.controlnet)
            _write_model(checkpoint, model, fill, folder / name, f"{CONTROLNET}.")
        else:
            _write_model(checkpoint, models.skeleton(spec, dtype=torch.float32), fill, folder / name)
        write_checksums(folder / name)
    for file in folder.rglob("*.safetensors"):  # safetensors ignores the umask: only the owner could read them
        file.chmod(folder.stat().st_mode & 0o666)


def _pieces(checkpoint: Checkpoint) -> list[models.Piece]:
    if checkpoint.state["strategy"].get("controlnet") is not None:
        raise UserError(f"--single-file: {checkpoint.folder} holds a ControlNet, which is one folder; leave it out")
    if checkpoint.state["strategy"].get("lora") is not None:
        raise UserError(
            f"--single-file: {checkpoint.folder} holds adapters, whose files ComfyUI reads next to the model; leave it "
            "out"
        )
    return models.single_file_layout(ModelSpec.model_validate(checkpoint.state["model"]))


def _write_single_files(
    checkpoint: Checkpoint, fills: Sequence[tuple[str, Fill]], kind: Kind, pieces: Sequence[models.Piece], folder: Path
) -> None:
    folder.mkdir()
    spec, shapes = ModelSpec.model_validate(checkpoint.state["model"]), _shapes(checkpoint)
    state = models.skeleton(spec, dtype=torch.float32).state_dict()
    buffers = {name: tensor for name, tensor in state.items() if name not in shapes}
    for name, fill in fills:
        called = re.sub(r"[^\w.+-]+", "-", spec.name) + name.removeprefix(TRANSFORMER).replace("_", "-")
        file = folder / f"{called}-{kind}.safetensors"
        write_single_file(file, kind, pieces, shapes, buffers, fill)
    write_checksums(folder)


def _write_model(checkpoint: Checkpoint, model: nn.Module, fill: Fill, folder: Path, prefix: str = "") -> None:
    """`prefix`: of its parameters' names in the checkpoint."""
    shapes = {name.removeprefix(prefix): shape for name, shape in _shapes(checkpoint).items()}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in shapes}
    described = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()} | buffers
    split = split_torch_state_dict_into_shards(described, filename_pattern=_FILE, max_shard_size=_MOST)
    for file, names in split.filename_to_tensors.items():
        here = {name: torch.empty(shapes[name]) for name in names if name in shapes}
        fill({f"{prefix}{name}": tensor for name, tensor in here.items()})
        here |= {name: buffers[name].contiguous() for name in names if name in buffers}
        save_file(here, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{_FILE.format(suffix='')}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    model.save_config(folder)  # type: ignore[operator]  # of diffusers' ConfigMixin


def _write_adapters(checkpoint: Checkpoint, spec: ModelSpec, lora: LoraSpec, fill: Fill, folder: Path) -> None:
    adapters = {name: torch.empty(shape) for name, shape in _shapes(checkpoint).items()}
    fill(adapters)
    source = Path(checkpoint.state["run"]["model"]["init_from"])
    base = functools.partial(load_model, spec, source, dtype=torch.bfloat16)  # bf16 files stay mapped
    if lora.pissa:
        lora, adapters = models.of_plain_weights(lora, adapters, base())
    models.save_adapters(folder, lora, adapters)
    try:
        models.save_for_comfyui(folder, spec, lora, adapters, base)
    except UserError as error:
        log.notice(f"note: no LoRA file for ComfyUI is written: {error}")


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in checkpoint.state["parameters"].items()}
