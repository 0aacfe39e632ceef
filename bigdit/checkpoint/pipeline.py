"""Makes a diffusers pipeline of exported weights, the run's encoders, and a scheduler for its objective."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bigdit import models, objectives
from bigdit.catalog.families import FAMILIES, objective_of
from bigdit.catalog.resolve import INDEX, config_of, index_of
from bigdit.checkpoint.folder import Checkpoint
from bigdit.config.data import VaeCodec
from bigdit.config.load import parse_run
from bigdit.config.run import RunConfig
from bigdit.errors import UserError
from bigdit.files import check_regular, leads_out, lfs_pointer, read_bytes
from bigdit.objective_spec import ObjectiveSpec, partial
from bigdit.strategy import ModelSpec

_TRANSFORMER, _SECOND, _SCHEDULER, _VAE = "transformer", "transformer_2", "scheduler", "vae"
_KEYS = "encoders.text.pipeline, and next to encoders.image.path and model.init_from,"


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: its `index`, the folder of each of its `parts`, and its scheduler's configuration."""

    index: dict[str, Any]
    parts: dict[str, Path]
    scheduler: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write everything but the transformer to `folder`. Raises OSError."""
        for name, source in self.parts.items():
            copy_part(source, folder / name)
        (folder / _SCHEDULER).mkdir()
        (folder / _SCHEDULER / "scheduler_config.json").write_text(json.dumps(self.scheduler, indent=2) + "\n")
        (folder / INDEX).write_text(json.dumps(self.index, indent=2) + "\n")


def pipeline_of(checkpoint: Checkpoint) -> Pipeline | str:
    """The pipeline whose encoders a checkpoint's run used; or the reason, for people, why there is none."""
    run = parse_run(checkpoint.state["run"], str(checkpoint.folder))
    spec = ModelSpec.model_validate(checkpoint.state["model"])
    if run.strategy.controlnet is not None:
        made_by = FAMILIES[spec.class_name].controlnet
        return f"load it by {made_by}.from_pretrained, and give it to the ControlNet pipeline of {run.model.init_from}"
    base = next((folder for folder in _folders(run) if (folder / INDEX).is_file()), None)
    if base is None:
        return f"in {_KEYS} there is no {INDEX} of a pipeline"
    try:
        index = index_of(base)
    except UserError as error:
        return str(error)
    if index.get(_TRANSFORMER) != ["diffusers", spec.class_name]:
        return f"{base / INDEX} has no {spec.class_name} as its transformer"
    if run.strategy.lora is not None and run.strategy.lora.kind != "lora":
        kind = run.strategy.lora.title
        return f"diffusers loads no {kind}; peft's PeftModel.from_pretrained loads it over the transformer of {base}"
    if run.strategy.lora is not None:
        loader = models.loaded_by(spec.class_name, index.get("_class_name"))
        if loader is None:
            return f"diffusers loads no adapters of {spec.class_name}; `bigdit sample` generates with them"
        second = run.model.init_from is not None and run.model.init_from.name == _SECOND
        return f"load them over {base}, by {loader}{' with load_into_transformer_2=True' if second else ''}"
    if _is_part(index.get(_SECOND)) and partial(objective_of(spec, run.objective)) is not None:
        return f"{base} has two experts; replace the one that training started from with transformer/"
    if run.encoders.text is not None and run.encoders.text.files:
        return f"encoders.text.files are not in {base}; replace its transformer with this one"
    wanted = [name for name, entry in index.items() if _is_part(entry) and name not in (_TRANSFORMER, _SCHEDULER)]
    parts = {name: base / name for name in wanted}
    if isinstance(run.encoders.image, VaeCodec) and _VAE in parts:
        parts[_VAE] = run.encoders.image.path
    problems = (part_problem(part) for part in parts.values())
    if problem := next(filter(None, problems), None):
        return f"the pipeline {base} cannot be copied: {problem}"
    scheduler = _scheduler(base, index, objective_of(spec, run.objective))
    return scheduler if isinstance(scheduler, str) else Pipeline(index, parts, scheduler)


def _folders(run: RunConfig) -> Iterator[Path]:
    """The run's folders that may be a pipeline."""
    for section in (run.encoders.text, run.encoders.first_frame):
        if section is not None and section.pipeline is not None:
            yield section.pipeline
    image = run.encoders.image
    yield from (path.parent for path in (getattr(image, "path", None), run.model.init_from) if path is not None)


def _is_part(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def _scheduler(base: Path, index: dict[str, Any], objective: ObjectiveSpec) -> dict[str, Any] | str:
    """The configuration of the pipeline's scheduler with the objective's noise; or the reason why that is
    impossible."""
    entry: Any = index.get(_SCHEDULER)
    if not _is_part(entry) or entry[0] != "diffusers":
        return f"{base / INDEX} names no scheduler of diffusers"
    file = base / _SCHEDULER / "scheduler_config.json"
    try:
        return objectives.scheduler_config(objective, entry[1], config_of(file))
    except (UserError, TypeError, ValueError, AttributeError) as error:
        return f"{file} makes no {entry[1]}: {error}"


_CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_LARGEST_JSON = 2**28
"""Bytes; Gemma's tokenizer.json has 34 MB."""
_CLONE = 0x40049409
"""FICLONE. Source: ioctl_ficlone(2)."""


def part_problem(part: Path) -> str | None:
    """The problem of a pipeline's part, for people: a file is missing, truncated, no JSON, or a link out of the folder.

    None without a problem. Weights are not read.
    """
    if not part.is_dir():
        return f"{part} is one file, and a pipeline has folders" if part.is_file() else f"{part} is missing"
    files = sorted(part.rglob("*"))
    problems = (problem for file in files for problem in _problems(part, file))
    try:
        problem = next(problems, None)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    if problem is None and _is_model(part) and not any(file.suffix in _WEIGHTS for file in files):
        return f"{part} has no weights"
    return problem


def copy_part(source: Path, folder: Path) -> None:
    """Copy the files of a part into a new folder. Raises OSError.

    Copies take no disk space on file systems that can share content (XFS, btrfs).
    """
    folder.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_dir():
            copy_part(file, folder / file.name)
        elif not _cloned(file, folder / file.name):
            shutil.copyfile(file, folder / file.name)


def _problems(part: Path, file: Path) -> Iterator[str]:
    if not file.exists():  # the hub's cache consists of links
        yield f"{file} is a link to {file.readlink()}, which is missing"
    elif leads_out(part, file):  # its target might be published by mistake
        yield f"{file} is a link out of its folder; copy there what it leads to"
    elif not file.is_dir():
        check_regular(file)
        yield from _damages(file)


def _damages(file: Path) -> Iterator[str]:
    if pointer := lfs_pointer(file):
        yield pointer
    elif file.suffix == ".safetensors":
        try:
            with safe_open(file, "np"):  # compares the file's length with its header
                pass
        except SafetensorError as error:
            yield f"{file} is damaged or cut off ({error})"
    elif file.suffix == ".json":
        found = _json(file)
        if isinstance(found, Exception):
            yield f"{file} is no JSON ({found})"
        named = found.get("weight_map") if isinstance(found, dict) else None
        for name in sorted(set(map(str, named.values()))) if isinstance(named, dict) else ():
            if Path(name).name != name or not (file.parent / name).exists():
                yield f"{file.parent / name} is missing, which {file.name} names"


def _is_model(part: Path) -> bool:
    """Whether the part has a configuration of a model (diffusers or transformers). A tokenizer may have a copy of
    one."""
    file = part / _CONFIG
    if part.name.startswith("tokenizer") or not file.is_file():
        return False
    found = _json(file)
    return isinstance(found, dict) and ("_class_name" in found or "architectures" in found)


def _json(file: Path) -> Any:
    """Its content; the error if it is no JSON."""
    try:
        return json.loads(read_bytes(file, _LARGEST_JSON))
    except (ValueError, RecursionError) as error:
        return error


def _cloned(file: Path, target: Path) -> bool:
    try:
        with open(file, "rb") as source, open(target, "wb") as copied:
            fcntl.ioctl(copied, _CLONE, source.fileno())
    except OSError:
        return False
    return True
