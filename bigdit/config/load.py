"""Read YAML, apply `--set a.b=c`, validate; every problem is one line that names its key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bigdit.config.run import RunConfig
from bigdit.documents import parse_yaml, read_mapping
from bigdit.errors import UserError, nearest


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that `path` describes, with `key.path=value` overrides. Raises UserError with all problems."""
    return parse_run(read_run(path, overrides), str(path))


def read_run(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The document in `path` with its overrides, not yet validated. Raises UserError where it is no mapping."""
    document = read_mapping(path, parse_yaml, f"the config {path}", "sections such as model, data and train")
    for override in overrides:
        _apply(document, override)
    return document


def parse_run(document: dict[str, Any], source: str) -> RunConfig:
    """Validate a document; `source` names it in errors."""
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise UserError(*(f"{source}: {_line(detail)}" for detail in error.errors())) from None


def _apply(document: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found or not key:
        raise UserError(f"--set expects key.path=value, such as train.steps=100, and {override!r} was found")
    *parents, last = key.split(".")
    node = document
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {override}: {parent} is a value, and has no keys")
    try:
        node[last] = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"--set {override[:80]}: the value is {error}") from None


def _line(detail: ErrorDetails) -> str:
    path = [str(part) for part in detail["loc"]]
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_hint(path)}"
    if detail["type"] == "missing":
        return f"{key}: missing; it has no default"
    message = detail["msg"].removeprefix("Value error, ")
    found = detail["input"]
    if isinstance(found, dict | list):
        return f"{key}: {message}"
    return f"{key}: {message}; {found!r} was found"


def _hint(path: Sequence[str]) -> str:
    """Where a misplaced key belongs, or what a misspelt one may have meant."""
    here = _fields_at(path[:-1])
    elsewhere = [f"{section}.{path[-1]}" for section in RunConfig.model_fields if path[-1] in _fields_at([section])]
    return f"did you mean {', '.join(elsewhere)}?" if elsewhere else nearest(path[-1], here)


def _fields_at(path: Sequence[str]) -> list[str]:
    """The keys that the section at `path` knows."""
    models: list[type[BaseModel]] = [RunConfig]
    for part in path:
        inner = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        if inner:
            models = [m for annotation in inner for m in _models_in(annotation)]
        else:  # the tag of a discriminated union stands in the path as well: data's key `image` → `identity`
            models = [m for m in models if getattr(m.model_fields.get("name"), "default", None) == part] or models
    return sorted({name for model in models for name in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
