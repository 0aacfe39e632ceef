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
    node: Any = document
    for parent in parents:
        node = _within(node, parent, override)
        if not isinstance(node, dict | list):
            raise UserError(f"--set {override[:80]}: {parent} is a value, and has no keys")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"--set {override[:80]}: the value is {error}") from None
    if isinstance(node, list):
        _within(node, last, override)
        node[int(last)] = value
    else:
        node[last] = value


def _within(node: Any, key: str, override: str) -> Any:
    """What a mapping has under a key, a section where it has nothing; or a list by its number."""
    if isinstance(node, dict):
        return node.setdefault(key, {})
    if not key.isdecimal() or int(key) >= len(node):
        raise UserError(f"--set {override[:80]}: {key[:20]} is no number of a list of {len(node)}, from 0 on")
    return node[int(key)]
