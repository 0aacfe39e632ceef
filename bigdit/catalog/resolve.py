"""The ModelSpec that a config asks for: by catalogue name, by a diffusers config.json, or written out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bigdit.catalog.families import argument_problems
from bigdit.catalog.models import model
from bigdit.config.run import ModelConfig
from bigdit.documents import parse_json, read_file
from bigdit.errors import UserError
from bigdit.spec import ModelSpec

INDEX = "model_index.json"
TRANSFORMER = "transformer"
"""The folder of a transformer in a pipeline's, in diffusers' layout."""


def model_spec(config: ModelConfig) -> ModelSpec:
    """What is to be trained. Raises UserError unless exactly one of name, path and class_name is given, and for
    arguments that no class takes."""
    ways = [key for key in ("name", "path", "class_name") if getattr(config, key) is not None]
    if len(ways) != 1:
        found = " and ".join(f"model.{way}" for way in ways) or "none of them"
        raise UserError(f"one of model.name, model.path and model.class_name says what is trained; {found} was found")
    if config.kwargs and config.class_name is None:
        raise UserError(f"model.kwargs goes with model.class_name, and model.{ways[0]} was found")
    if config.name is not None:
        return model(config.name).spec
    if config.path is not None:
        return read_model_config(config.path)
    assert config.class_name is not None
    return _sensible(ModelSpec(name=config.class_name, class_name=config.class_name, kwargs=config.kwargs))


def read_model_config(path: Path) -> ModelSpec:
    """The ModelSpec in a diffusers `config.json`, in the folder that holds one, or in a pipeline's folder. It has the
    name of its folder, of the pipeline where the transformer lies in one, or of a file that is called otherwise.

    Raises UserError where the file is missing, is not JSON, names no class, or has arguments that no class takes.
    """
    file = config_file(path)
    try:
        document: Any = parse_json(read_file(file, str(file), "; a diffusers config.json was expected"))
    except ValueError as error:
        raise UserError(f"{file} is not a diffusers config.json: it is {error}") from None
    class_name = document.get("_class_name") if isinstance(document, dict) else None
    if not isinstance(class_name, str):
        raise UserError(f"{file} names no _class_name, as diffusers' config.json does")
    kwargs = {key: value for key, value in document.items() if not key.startswith("_")}
    spec = ModelSpec(name=_name(file.absolute()) or class_name, class_name=class_name, kwargs=kwargs)
    try:
        return _sensible(spec)
    except UserError as error:
        raise UserError(*(f"{file}: {line.removeprefix('model.kwargs.')}" for line in error.problems)) from None


def _name(file: Path) -> str:
    if file.name != "config.json":
        return file.stem
    return file.parent.parent.name if file.parent.name == TRANSFORMER else file.parent.name


def _sensible(spec: ModelSpec) -> ModelSpec:
    if problems := argument_problems(spec):
        raise UserError(*problems)
    return spec


def config_file(path: Path) -> Path:
    """The config.json of the transformer at `path`, which may be it, its folder, or a pipeline's or its index."""
    path = path.parent if path.name == INDEX else path
    if not os.path.isdir(path):  # False for a name that no file can have, where Path.is_dir raises
        return path
    inner = path / TRANSFORMER / "config.json"
    return inner if inner.is_file() else path / "config.json"
