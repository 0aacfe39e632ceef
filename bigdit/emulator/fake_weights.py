"""`--fake-weights`: a hub cache of pipelines whose weights are holes in files. from_pretrained downloads nothing.

Repositories are written from the catalogue: the configs of a pipeline, or of one component.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bigdit.catalog.models import CatalogModel, Vae, model
from bigdit.catalog.names import load_json
from bigdit.documents import parse_json, read_mapping
from bigdit.emulator.fake_tokenizers import document, write_tokenizer
from bigdit.errors import UserError, nearest
from bigdit.files import write_json, write_text
from bigdit.processes import own_module

_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".onnx", ".msgpack", ".h5", ".gguf")


def lay_out(names: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Write the repositories to a hub cache in `folder`; returns the environment variables for scripts to find it.

    A name is that of a repository in the catalogue, or `NAME=FOLDER` or `NAME=REPOSITORY`: NAME is then made from a
    folder with configs, or from a repository in the catalogue. The user's own cache is linked. The network is not used.
    `environment`: variables with which a CUDA build of torch can be imported without CUDA. Raises UserError for names
    and folders from which nothing can be built.
    """
    hub = folder / "hub"
    hub.mkdir(parents=True, exist_ok=True)
    write_text(hub / "version.txt", "1")  # otherwise transformers 4 assumes another layout
    dtypes = {}
    for name in names:
        asked, _, source = name.partition("=")
        snapshot = _new_snapshot(hub, asked)
        dtypes[str(snapshot)] = _write_configs(asked, source or asked, snapshot)
    _write_weights(dtypes, environment)
    for laid in dtypes:
        _write_empty_configs(Path(laid))
    _link_own(hub)
    return {"HF_HUB_CACHE": str(hub), "HUGGINGFACE_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}


def _new_snapshot(hub: Path, name: str) -> Path:
    """The folder of a repository's one revision. Source: huggingface_hub's guide `manage-cache`."""
    if name.count("/") > 1 or name.startswith(("/", ".")):
        raise UserError(
            f"--fake-weights {name}: not the name of a repository; write --fake-weights NAME={name}, with the script's "
            "name for it"
        )
    revision = hashlib.sha1(name.encode()).hexdigest()
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    if snapshot.exists():
        raise UserError(f"--fake-weights {name} was given twice")
    snapshot.mkdir(parents=True)
    write_text(repository / "refs" / "main", revision)
    return snapshot


def _write_configs(name: str, source: str, snapshot: Path) -> str:
    """Write a repository without its weights; returns their dtype."""
    if Path(source).is_dir():
        return _copy_configs(name, Path(source), snapshot)
    if source != name and source.startswith(("/", ".", "~")):
        raise UserError(f"--fake-weights {name}={source}: there is no such folder")
    found = repository(source)
    for path, config in found.configs.items():
        write_json(snapshot / path, config)
    for tokenizer, kind in found.tokenizers.items():
        write_tokenizer(kind, snapshot / tokenizer)
    return found.dtype


def _copy_configs(name: str, source: Path, snapshot: Path) -> str:
    """Copy all files but weights, and make the tokenizers that the folder lacks according to model_index.json."""
    if not any(source.rglob("config.json")):
        raise UserError(
            f"--fake-weights {name}={source}: the folder has no config.json; a pipeline has one for each model"
        )
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and not path.name.endswith((*_WEIGHTS, ".index.json")):
            (snapshot / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, snapshot / relative)
    kinds = {recipe["class"]: kind for kind, recipe in reversed(document()["tokenizers"].items())}
    for part, class_name in _tokenizers(snapshot / "model_index.json", f"--fake-weights {name}={source}").items():
        if not (snapshot / part).is_dir():
            kind = kinds.get(class_name.removesuffix("Fast"))
            if kind is None:
                raise UserError(
                    f"--fake-weights {name}={source}: lacks {part}/, and a {class_name} cannot be generated; copy the "
                    "tokenizer's files there"
                )
            write_tokenizer(kind, snapshot / part)
    return "float32"


def _tokenizers(index: Path, asked: str) -> dict[str, str]:
    """The tokenizers in a model_index.json, and their classes, without null entries, which the script passes itself.

    Raises UserError if it is damaged.
    """
    if not index.is_file():
        return {}
    parts = read_mapping(index, parse_json, f"{asked}: its model_index.json", "an object of components")
    found = {}
    for part, value in parts.items():
        if part.startswith("tokenizer") and value not in (None, [None, None]):
            if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)):
                raise UserError(f"{asked}: {part} in its model_index.json is no [library, class]")
            found[part] = value[1]
    return found


def _write_empty_configs(snapshot: Path) -> None:
    """Write empty config.json files into tokenizers' folders without one: offline, transformers 5.14.1 fails without
    them, even if the cache knows that they do not exist."""
    for found in snapshot.rglob("tokenizer_config.json"):
        if not found.with_name("config.json").exists():
            write_json(found.with_name("config.json"), {})


def _write_weights(dtypes: Mapping[str, str], environment: Mapping[str, str] | None) -> None:
    """Write the weights, in a separate process that imports torch, diffusers and transformers."""
    done = subprocess.run(
        [sys.executable, *own_module("bigdit.emulator.fake_models")],
        input=json.dumps(dtypes),
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})} if _built_for_cuda() else None,
    )
    if done.returncode == 1:
        problems = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        if problems:
            raise UserError(*problems)
    if done.returncode:
        raise RuntimeError(f"bigdit.emulator.fake_models exited with {done.returncode}:\n{done.stderr}")


def _built_for_cuda() -> bool:
    """Whether torch here is built for CUDA. A CPU build rejects an emulated GPU."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return re.search(r"^cuda\b.*= '", Path(found.origin).with_name("version.py").read_text(), re.MULTILINE) is not None


def _link_own(hub: Path) -> None:
    """Link the other repositories of the user's own cache."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    folder = Path(own).expanduser()
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.is_dir() and not entry.name.startswith(".") and not (hub / entry.name).exists():
            (hub / entry.name).symlink_to(entry.resolve())


class Repository(NamedTuple):
    """A repository without weights.

    `configs`: JSON documents by path. `tokenizers`: the kind of each (in repositories.json) by folder; `""` is the
    repository itself. `dtype` of the weights: torch's name without `torch.`.
    """

    configs: dict[str, dict[str, Any]]
    tokenizers: dict[str, str]
    dtype: str


def known() -> tuple[str, ...]:
    """The names of the repositories that can be written."""
    return tuple(document()["repositories"])


def option_for(name: str) -> str:
    """The option for a repository: its name, or its name and what has its configs."""
    is_known = name.casefold() in (each.casefold() for each in known())
    like = "=LIKE, a folder with its configs or a repository of the catalogue with the same"
    return f"--fake-weights {name}" + ("" if is_known else like)


def repository(name: str) -> Repository:
    """The repository of that name, in any case of letters. Raises UserError if the catalogue has none."""
    entries = {known.casefold(): entry for known, entry in document()["repositories"].items()}
    entry = entries.get(name.casefold())
    if entry is None:
        raise UserError(
            f"--fake-weights {name}: the catalogue does not know this repository; {nearest(name, known())}; for any "
            f"other, {option_for(name)}"
        )
    dtype: str = entry["dtype"]
    if "model" in entry:
        return _pipeline(entry, dtype)
    if "vae" in entry:
        vae = Vae(name=entry["vae"], **load_json("models.json")["vaes"][entry["vae"]])
        return Repository({"config.json": _vae(vae)}, {}, dtype)
    encoder = _text_encoder(entry["text_encoder"], None, dtype)
    return Repository({"config.json": encoder}, {"": entry["tokenizer"]}, dtype)


def _pipeline(entry: dict[str, Any], dtype: str) -> Repository:
    found: CatalogModel = model(entry["model"])
    recipe = document()["pipelines"][found.spec.class_name]
    scheduler = {**recipe["scheduler"], **entry.get("scheduler", {})}
    configs: dict[str, dict[str, Any]] = {
        "transformer/config.json": {"_class_name": found.spec.class_name, **found.spec.kwargs},
        "vae/config.json": _vae(found.vae),
        "scheduler/scheduler_config.json": scheduler,
    }
    if second := entry.get("transformer_2"):  # Wan 2.2's expert for little noise
        other = model(second).spec
        configs["transformer_2/config.json"] = {"_class_name": other.class_name, **other.kwargs}
    tokenizers = {}
    for number, (encoder, class_name, tokenizer) in enumerate(recipe["text"], start=1):
        suffix = "" if number == 1 else f"_{number}"  # as in diffusers' pipelines
        configs[f"text_encoder{suffix}/config.json"] = _text_encoder(encoder, class_name, dtype)
        tokenizers[f"tokenizer{suffix}"] = tokenizer
    index = _index(entry.get("pipeline", recipe["pipeline"]), configs, tokenizers)
    boundary = {"boundary_ratio": entry["boundary_ratio"]} if "boundary_ratio" in entry else {}
    configs["model_index.json"] = index | boundary
    return Repository(configs, tokenizers, dtype)


def _index(pipeline: str, configs: dict[str, dict[str, Any]], tokenizers: dict[str, str]) -> dict[str, Any]:
    """diffusers' model_index.json: the library and the class of each component."""
    parts = {
        path.split("/")[0]: ["diffusers", config["_class_name"]]
        if "_class_name" in config
        else ["transformers", config["architectures"][0]]
        for path, config in configs.items()
    }
    parts |= {name: ["transformers", document()["tokenizers"][kind]["class"]] for name, kind in tokenizers.items()}
    return {"_class_name": pipeline, "_diffusers_version": "0.31.0", **dict(sorted(parts.items()))}


def _vae(vae: Vae) -> dict[str, Any]:
    if vae.kwargs is None:
        raise UserError(f"the catalogue has no constructor arguments of {vae.name}; give a folder with its configs")
    return {"_class_name": vae.class_name, **vae.kwargs}


def _text_encoder(name: str, class_name: str | None, dtype: str) -> dict[str, Any]:
    """The config of a text encoder for transformers 4 and later. Other keys have their classes' defaults."""
    entry = load_json("models.json")["text_encoders"][name]
    if class_name in document()["around"]:
        around = document()["around"][class_name]
        inner = {"text_config": {**entry["kwargs"], **around["text_config"]}}
        return {"architectures": [class_name], "torch_dtype": dtype, **around, **inner}
    model_type = entry["config_class"].removesuffix("Config").replace("CLIPText", "clip_text_model").lower()
    return {
        "architectures": [class_name or entry["class_name"]],
        "model_type": model_type,
        "torch_dtype": dtype,
        **entry["kwargs"],
    }
