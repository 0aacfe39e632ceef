"""Checks of a folder that save_pretrained wrote, before a library loads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from bigdit.catalog.families import too_large
from bigdit.documents import indexed_files, read_json, weight_files
from bigdit.encoders.host_bytes import WEIGHTS
from bigdit.errors import UserError
from bigdit.files import check_regular, leads_out, lfs_pointer
from bigdit.models.build import SCALES, dequantised, not_safetensors, read_single_file, without_weights
from bigdit.store.tensors import weights_digest
from bigdit.units import how_many

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_config(key: str, folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises UserError, which names the key of run.yaml."""
    if pointer := lfs_pointer(folder / "config.json"):
        raise UserError(f"{key}: {pointer}")
    try:
        config = read_json(folder / "config.json")
    except OSError as error:
        raise UserError(
            f"{key}: {folder / 'config.json'} cannot be read ({error.strerror}); fetch the model by `hf download`, or "
            "name a folder of save_pretrained"
        ) from None
    except ValueError as error:
        raise UserError(f"{key}: {folder / 'config.json'} is {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{key}: {folder / 'config.json'} should hold a JSON object")
    if problems := too_large(config):
        raise UserError(*(f"{key}: {folder / 'config.json'}: {problem}" for problem in problems))
    return config


def check_files(key: str, folder: Path) -> None:
    """Raise UserError for files that a library would load and bigdit rejects.

    These are pipes, links out of the folder, Git LFS pointers, adapters for other weights, and an index that names
    pickles or files elsewhere.
    """
    for file in sorted(folder.rglob("*")):
        try:
            if not file.exists():  # the library reports missing files
                continue
            if leads_out(folder, file):
                raise UserError(f"{key}: {file} is a link out of its folder; copy the file there")
            if file.is_dir():
                continue
            check_regular(file)
            if pointer := lfs_pointer(file):
                raise UserError(f"{key}: {pointer}")
            if file.name == "adapter_config.json":
                raise UserError(f"{key}: {file} belongs to adapters; merge them into the weights, or delete it")
            if ".safetensors.index." in file.name:
                indexed_files(file)
        except OSError as error:
            raise UserError(f"{key}: {file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{key}: {folder}: {error}") from None


def load_from(kind: Any, key: str, folder: Path, **arguments: Any) -> Any:
    """A model or tokenizer of the class `kind` by from_pretrained, only from safetensors, since pickles can run code.

    `folder` may be a file with the weights of a model. Then `config` is among the `arguments`. Raises UserError if it
    cannot be loaded, or if weights are missing or have another shape. Libraries would initialise these at random.
    """
    try:
        if not issubclass(kind, torch.nn.Module):
            tokenizer = kind  # or an image processor; neither has weights
            if not folder.exists():
                raise UserError("it is missing; fetch the model by `hf download`")
            loaded = tokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if lacks_vocabulary(getattr(loaded, "tokenizer", loaded), folder):
                raise UserError(f"{VOCABULARY} is missing; fetch the model by `hf download`")
            return loaded
        if folder.is_dir():
            found, arguments["variant"] = weight_files(folder, *WEIGHTS)
            if not found:
                raise FileNotFoundError(without_weights(folder, *WEIGHTS))
        elif problem := not_safetensors(folder):
            raise UserError(problem)
        else:
            tensors = dequantised(_of_its_part(load_file(folder), arguments["config"]), arguments["dtype"])
            arguments["state_dict"] = _of_open_clip(tensors, arguments["config"])
        model, info = kind.from_pretrained(
            folder if folder.is_dir() else None,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **arguments,
        )
    except UserError as error:
        raise UserError(*(f"{key}: {folder}: {problem}" for problem in error.problems)) from None
    except Exception as error:  # for unexpected files, the libraries raise any class
        raise UserError(f"{key}: {folder} cannot be loaded: {' '.join(str(error).split())}") from None
    if scales := sorted(name for name in info["unexpected_keys"] if name.endswith(SCALES)):
        raise UserError(
            f"{key}: {folder} has fp8 weights with scales, which its library leaves out, the first {scales[0]}; take "
            "weights in 16 bits, or name the file as encoders.text.files"
        )
    instead = "".join(f"; it holds {name} instead" for name in sorted(info["unexpected_keys"])[:1])
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info[problem])
        if names:
            what = problem.removesuffix("_keys")
            raise UserError(
                f"{key}: {folder} has {how_many(len(names), f'{what} weight')}, the first {names[0]}{instead}"
            )
    return model.eval()


def lacks_vocabulary(tokenizer: Any, folder: Path) -> bool:
    """Whether the folder of a tokenizer, or of its class, has no vocabulary. transformers then makes one of special
    tokens alone, and each word is unknown."""
    names: Mapping[str, str] = getattr(tokenizer, "vocab_files_names", {})
    if not names or (folder / VOCABULARY).is_file() or any(folder.glob("*.model")):
        return False
    parts = [name for name in names.values() if name != VOCABULARY]
    return not parts or not all((folder / name).is_file() for name in parts)


VOCABULARY = "tokenizer.json"
_PARTS = re.compile(r"(text_encoders\.\w+|conditioner\.embedders\.\d+)\.(transformer|model)\.")
"""Where whole checkpoints of Stability have their text encoders."""


def _of_its_part(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Of a file with several text encoders, the tensors of the one whose vocabulary the config has."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _PARTS.match(name):
            parts.setdefault(match[0], {})[name[match.end() :]] = tensor
    for own in parts.values():
        if any(each.shape == (config.vocab_size, config.hidden_size) for each in own.values()):
            return own
    return tensors


_OPEN_CLIP = "transformer.resblocks.0.ln_1.weight"


def _of_open_clip(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """The tensors by transformers' names, if a file or a part of it has OpenCLIP's."""
    for name in tensors:
        if name.endswith(_OPEN_CLIP):
            prefix = name.removesuffix(_OPEN_CLIP)
            return convert_open_clip_checkpoint(SimpleNamespace(config=config), tensors, prefix)  # type: ignore[no-any-return]
    return tensors


def load_from_file(kind: Any, key: str, file: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model of diffusers with the weights of one file, named as in diffusers or as in its original project.

    Raises UserError if it cannot be loaded, or weights are missing or have another shape.
    """
    try:
        if problem := not_safetensors(file):
            raise UserError(problem)
        model = kind.from_config(config)
        tensors = read_single_file(kind.__name__, file, model.state_dict(), dtype=dtype, config=config)
        missing = sorted(model.to(dtype).load_state_dict(tensors, strict=False).missing_keys)
    except UserError as error:
        raise UserError(*(f"{key}: {file}: {problem}" for problem in error.problems)) from None
    except Exception as error:  # for unexpected files, the libraries raise any class
        raise UserError(f"{key}: {file} cannot be loaded: {' '.join(str(error).split())}") from None
    if missing:
        raise UserError(f"{key}: {file} has {how_many(len(missing), 'missing weight')}, the first {missing[0]}")
    return model.eval()


def weights_sample(folder: Path, dtype: str) -> str | None:
    """xxh3-128, in hex, of the first row of each tensor in a folder, in `dtype`; None if unreadable.

    It distinguishes weights of the same model without reading all, since any training changes most tensors.
    """
    rows: dict[str, torch.Tensor] = {}
    try:
        for file in weight_files(folder, *WEIGHTS)[0]:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    tensor = opened.get_slice(name)
                    row = tensor[:1] if tensor.get_shape() else opened.get_tensor(name)
                    rows[name] = row.to(DTYPES[dtype]) if row.is_floating_point() else row
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError):
        return None
    return weights_digest(rows) if rows else None
