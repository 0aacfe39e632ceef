"""`--fake-weights`: a hub cache of pipelines whose weights are holes in files, so that from_pretrained downloads
nothing and takes no disk."""

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

from bigdit.checkout import own_module
from bigdit.documents import parse_json, read_mapping
from bigdit.emulator.fake_tokenizers import write_tokenizer
from bigdit.emulator.repositories import document, repository
from bigdit.errors import UserError
from bigdit.files import write_json, write_text

_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".onnx", ".msgpack", ".h5", ".gguf")


def lay_out(names: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Lay the repositories out in a hub cache in `folder`; the environment variables with which scripts find it.

    A name is that of a repository that the catalogue knows, or `NAME=FOLDER` or `NAME=REPOSITORY`: what the script
    asks for under NAME is then of a folder with configs, or of a repository that is known. What the user's own
    cache holds stays at hand; nothing is asked of the network. `environment` are the variables, over this process's
    own, with which a CUDA build of torch can be imported where there is no CUDA. Raises UserError for names and
    folders from which nothing can be built.
    """
    hub = folder / "hub"
    hub.mkdir(parents=True, exist_ok=True)
    write_text(hub / "version.txt", "1")  # or transformers 4 takes the cache for one of another layout
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
        raise UserError(f"--fake-weights {name}: no name of a repository; write --fake-weights NAME={name}, with the "
                        "name that the script asks for")  # fmt: skip
    revision = hashlib.sha1(name.encode()).hexdigest()
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    if snapshot.exists():
        raise UserError(f"--fake-weights {name} was given twice")
    snapshot.mkdir(parents=True)
    write_text(repository / "refs" / "main", revision)
    return snapshot


def _write_configs(name: str, source: str, snapshot: Path) -> str:
    """Write all of a repository but its weights; the dtype of these."""
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
    """Copy what is no weight, and make the tokenizers that model_index.json names and the folder lacks."""
    if not any(source.rglob("config.json")):
        raise UserError(
            f"--fake-weights {name}={source}: the folder holds no config.json; a pipeline's has one a model"
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
                    f"--fake-weights {name}={source}: lacks {part}/, and a {class_name} cannot be made here; copy the "
                    "tokenizer's files there"
                )
            write_tokenizer(kind, snapshot / part)
    return "float32"


def _tokenizers(index: Path, asked: str) -> dict[str, str]:
    """The tokenizers that a model_index.json names, and their classes; without those that the script passes itself,
    whose entries are null. Raises UserError where it is damaged."""
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
    """Write the config.json that AutoTokenizer asks for in tokenizers' folders, and that few of them have: offline
    transformers 5.14.1 stops where it is missing, even where the cache knows that it is."""
    for found in snapshot.rglob("tokenizer_config.json"):
        if not found.with_name("config.json").exists():
            write_json(found.with_name("config.json"), {})


def _write_weights(dtypes: Mapping[str, str], environment: Mapping[str, str] | None) -> None:
    """Write the weights, in a process of its own: it takes torch, diffusers and transformers."""
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
    """Whether torch here is a build that wants CUDA's libraries; one for CPUs alone refuses an emulated card."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return re.search(r"^cuda\b.*= '", Path(found.origin).with_name("version.py").read_text(), re.MULTILINE) is not None


def _link_own(hub: Path) -> None:
    """Links to what the user's own cache holds beside."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    folder = Path(own).expanduser()
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.is_dir() and not entry.name.startswith(".") and not (hub / entry.name).exists():
            (hub / entry.name).symlink_to(entry.resolve())
