"""Read YAML, apply `--set a.b=c`, validate; every problem is one line that names its key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigdit.config.run import RunConfig
from bigdit.config.wrong import wrong
from bigdit.documents import parse_yaml, read_mapping
from bigdit.errors import UserError


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
        raise UserError(*(f"{source}: {line}" for line in wrong(error, document, RunConfig))) from None


def _apply(document: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found or not key:
        raise UserError(f"--set expects key.path=value, such as train.steps=100, and {override[:80]!r} was found")
    *parents, last = key.split(".")
    node = document
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {override[:80]}: {parent} is a value, and has no keys")
    try:
        node[last] = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"--set {override[:80]}: the value is {error}") from None
