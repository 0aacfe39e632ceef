"""Read YAML, apply `--set a.b=c`, validate; every problem is one line that names its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigdit.config.run import RunConfig
from bigdit.config.wrong import wrong
from bigdit.documents import parse_json, parse_yaml, read_mapping
from bigdit.errors import UserError
from bigdit.units import how_many


def read_run(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The document in `path` with its overrides, not yet validated. Raises UserError where it is no mapping."""
    document = read_mapping(path, parse_yaml, f"the config {path}", "sections such as model, data and train")
    for override in overrides:
        _apply(document, override)
    return document


def parse_run(document: dict[str, Any], source: str = "", world_size: int | None = None) -> RunConfig:
    """Validate a document; `source` names it in errors. `world_size`: as many processes run, which a launcher has
    started. Raises UserError with all problems."""
    try:
        document = _with_strategy(document, world_size)
        return RunConfig.model_validate(document)
    except ValidationError as error:
        problems = wrong(error, document, RunConfig)
    except UserError as error:
        problems = list(error.problems)
    raise UserError(*(f"{source}: {line}" if source else line for line in problems))


def read_ds_config(path: Path, key: str = "strategy.ds_config") -> dict[str, Any]:
    """The document as it stands, which `key` names. Raises UserError where it is missing or not a JSON object."""
    return read_mapping(path, parse_json, f"{key}: {path}", "a JSON object")


def set_once(overrides: Sequence[str]) -> list[str]:
    """What `--set` was given. Raises UserError for a key that stands twice."""
    keys = [override.partition("=")[0] for override in overrides]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise UserError(*(f"--set says {key[:80]} {keys.count(key)} times; leave it once" for key in twice))
    return list(overrides)


def with_option(overrides: Sequence[str], option: str, values: Mapping[str, object]) -> list[str]:
    """The overrides with the keys that an option stands for. Raises UserError for a key that `--set` says too."""
    keys = [override.partition("=")[0] for override in overrides]
    if both := [key for key in values if key in keys]:
        raise UserError(*(f"{option} and --set {key} say the same key; leave one of them out" for key in both))
    return [*(f"{key}={value}" for key, value in values.items()), *overrides]


def _with_strategy(document: dict[str, Any], world_size: int | None) -> dict[str, Any]:
    """The document with the processes that run and the DeepSpeed document that its strategy names."""
    strategy = document.get("strategy", {})
    if not isinstance(strategy, dict):
        return document
    if isinstance(path := strategy.get("ds_config"), str):
        strategy = strategy | {"ds_config": read_ds_config(Path(path))}
    if world_size is not None:
        strategy = {"world_size": world_size} | strategy
        if strategy["world_size"] != world_size:
            raise UserError(
                f"strategy.world_size is {strategy['world_size']}, and {how_many(world_size, 'process')} "
                f"{'runs' if world_size == 1 else 'run'} (WORLD_SIZE); start as many, set it to {world_size}, or leave "
                "it out"
            )
    return document | {"strategy": strategy}


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
