"""`python -m bigdit.emulator.fake_models` writes fake weights, which are holes, next to every config in some folders.

It runs as a separate process, since it imports torch, diffusers and transformers. Standard input is a JSON object: by
folder, the dtype of weights whose config names none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bigdit.catalog.families import too_large
from bigdit.documents import parse_json, read_mapping
from bigdit.emulator.inside import sparse
from bigdit.errors import UserError, guard, nearest

VARIANTS = {"fp16": "float16", "bf16": "bfloat16"}
"""The values of `variant=` in from_pretrained, and the dtypes of these files."""


def main() -> None:
    """Write the weights of all folders. Raises UserError for a config that cannot be built."""
    for folder, dtype in json.load(sys.stdin).items():
        for config in sorted(Path(folder).rglob("config.json")):
            write_weights(config, dtype)


def write_weights(config: Path, dtype: str) -> None:
    """Write the weights of one component, in the dtype of its config or in `dtype`, and its variants."""
    try:
        document = read_mapping(config, parse_json, str(config), "a JSON object")
        if problems := too_large(document):
            raise ValueError("; ".join(problems))
        if "_class_name" in document:
            model, stem = _diffusers_model(document, config.parent), "diffusion_pytorch_model"
        else:
            model, stem = _transformers_model(document, config.parent), "model"
        stored = str(document.get("dtype") or document.get("torch_dtype") or dtype)
        if stored not in sparse.DTYPES:
            raise ValueError(f"dtype is {stored!r}; {nearest(stored, sparse.DTYPES)}")
    except Exception as error:  # for unexpected arguments, a constructor raises any class
        raise UserError(
            f"--fake-weights: no model can be built from {config}: {' '.join(str(error).split())}"
        ) from error
    for variant, variant_dtype in {"": stored, **VARIANTS}.items():
        name = f"{stem}.{variant}.safetensors" if variant else f"{stem}.safetensors"
        sparse.write(config.parent / name, _entries(model, variant_dtype), {"format": "pt"})


def _diffusers_model(document: dict[str, Any], folder: Path) -> Any:
    """The model on the meta device. A config without a version, as from the catalogue, is rewritten with defaults."""
    import diffusers
    import torch

    built = _class_in(diffusers, document["_class_name"], diffusers.ModelMixin)
    with torch.device("meta"):
        model = built.from_config(document)
    if "_diffusers_version" not in document:
        model.save_config(folder)
    return model


def _transformers_model(document: dict[str, Any], folder: Path) -> Any:
    import torch
    import transformers

    class_name = (document.get("architectures") or [None])[0]
    if class_name is None:
        raise ValueError('its "architectures" name no class')
    built = _class_in(transformers, class_name, transformers.PreTrainedModel)
    with torch.device("meta"):
        return built(built.config_class.from_pretrained(folder, trust_remote_code=False))


def _class_in(library: Any, name: str, kind: type) -> Any:
    """A model's class by its name. Raises ValueError for others, such as AutoModel, which loads any class."""
    found = getattr(library, name, None)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{library.__name__} has no model {name}")
    return found


def _entries(model: Any, dtype: str) -> list[sparse.SparseEntry]:
    """The tensors of the model's file: floating-point ones in `dtype`, and each shared one once, under its first
    name."""
    tensors = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return [
        sparse.SparseEntry(
            _stored_name(model, name),
            dtype if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
        )
        for name, tensor in tensors.values()
    ]


def _stored_name(model: Any, name: str) -> str:
    """A tensor's name in files. transformers before version 5 needs the prefix `text_model.` of CLIP's text model,
    which its class no longer has."""
    if type(model).__name__ == "CLIPTextModel" and not name.startswith("text_model."):
        return f"text_model.{name}"
    return name


if __name__ == "__main__":
    sys.exit(guard(main))
