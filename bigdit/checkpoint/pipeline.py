"""The pipeline around exported weights: what the run was fed by, and a scheduler of its objective, as diffusers lays it
out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigdit import objectives
from bigdit.catalog.families import objective_of
from bigdit.catalog.pipeline import INDEX, index_of
from bigdit.checkpoint.folder import Checkpoint
from bigdit.config import RunConfig
from bigdit.config.encoders import VaeCodec
from bigdit.config.load import parse_run
from bigdit.objective_spec import ObjectiveSpec
from bigdit.spec import ModelSpec

_TRANSFORMER, _SCHEDULER, _VAE = "transformer", "scheduler", "vae"
_KEYS = "encoders.text.pipeline, and beside encoders.image.path and model.init_from,"


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's folder: its `index`, where each of its `parts` lies, and the configuration of its scheduler for the
    objective that was trained by."""

    index: dict[str, Any]
    parts: dict[str, Path]
    scheduler: dict[str, Any]

    def write(self, folder: Path) -> None:
        """All of it but the transformer, to `folder`. Raises OSError."""
        for name, source in self.parts.items():
            _take(source, folder / name)
        (folder / _SCHEDULER).mkdir()
        (folder / _SCHEDULER / "scheduler_config.json").write_text(json.dumps(self.scheduler, indent=2) + "\n")
        (folder / INDEX).write_text(json.dumps(self.index, indent=2) + "\n")


def pipeline_of(checkpoint: Checkpoint) -> Pipeline | str:
    """The pipeline that the run of a checkpoint was fed by; or why its weights make none, for people. Raises UserError
    where an index cannot be read."""
    run = parse_run(checkpoint.state["run"], str(checkpoint.folder))
    spec = ModelSpec.model_validate(checkpoint.state["model"])
    base = next((folder for folder in _folders(run) if (folder / INDEX).is_file()), None)
    if base is None:
        return f"in {_KEYS} there is no {INDEX} of a pipeline"
    index = index_of(base)
    if index.get(_TRANSFORMER) != ["diffusers", spec.class_name]:
        return f"{base / INDEX} has no {spec.class_name} as its transformer"
    if run.train.lora is not None:
        return f"adapters are loaded over {base}, by its pipeline's load_lora_weights"
    wanted = [name for name, entry in index.items() if _is_part(entry) and name not in (_TRANSFORMER, _SCHEDULER)]
    parts = {name: base / name for name in wanted}
    if isinstance(run.encoders.image, VaeCodec) and _VAE in parts:
        parts[_VAE] = run.encoders.image.path
    if lacking := [str(place) for place in parts.values() if not place.is_dir()]:
        return f"of the pipeline {base} these folders are missing: {', '.join(lacking)}"
    scheduler = _scheduler(base, index, objective_of(spec, run.objective))
    return scheduler if isinstance(scheduler, str) else Pipeline(index, parts, scheduler)


def _folders(run: RunConfig) -> Iterator[Path]:
    """Those of the run in which a pipeline may lie."""
    for section in (run.encoders.text, run.encoders.first_frame):
        if section is not None and section.pipeline is not None:
            yield section.pipeline
    image = run.encoders.image
    yield from (path.parent for path in (getattr(image, "path", None), run.model.init_from) if path is not None)


def _is_part(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def _scheduler(base: Path, index: dict[str, Any], objective: ObjectiveSpec) -> dict[str, Any] | str:
    """The pipeline's own scheduler with what the objective says of its noise; or why it cannot have that."""
    library, class_name = index.get(_SCHEDULER) or [None, None]
    if library != "diffusers":
        return f"{base / INDEX} names no scheduler of diffusers"
    file = base / _SCHEDULER / "scheduler_config.json"
    said = json.loads(file.read_text()) if file.is_file() else {}
    return objectives.scheduler_config(objective, class_name, said)


def _take(source: Path, folder: Path) -> None:
    """The files of a part: weights as hard links, which take no room, where both are on one disk; what people edit, and
    what lies elsewhere, as copies."""
    folder.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_dir():
            _take(file, folder / file.name)
        elif file.suffix == ".json" or not _linked(file, folder / file.name):
            shutil.copyfile(file, folder / file.name)


def _linked(file: Path, target: Path) -> bool:
    try:
        os.link(file.resolve(), target)  # a hub's cache has links in the place of files
    except OSError:
        return False
    return True
