"""Read YAML, apply `--set a.b=c`, validate; every problem is one line that names its key.

A Strategy by itself is text such as `zero2,world_size=8,checkpointed_blocks=all`, or a YAML file of its keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigdit.config.run import RunConfig
from bigdit.config.wrong import wrong
from bigdit.documents import parse_json, parse_yaml, read_mapping
from bigdit.errors import UserError, nearest
from bigdit.strategy import Strategy
from bigdit.units import how_many


def read_run(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The document in `path` with its overrides, not yet validated. Raises UserError where it is no mapping."""
    document = read_mapping(path, parse_yaml, f"the config {path}", "sections such as model, data and train")
    for override in overrides:
        _apply(document, override)
    return document


def parse_run(document: dict[str, Any], source: str = "", world_size: int | None = None) -> RunConfig:
    """Validate a document; `source` names it in errors. `world_size`: the number of processes that a launcher started.
    Raises UserError with all problems."""
    try:
        document = _with_strategy(document, world_size)
        return RunConfig.model_validate(document)
    except ValidationError as error:
        problems = wrong(error, document, RunConfig)
    except UserError as error:
        problems = list(error.problems)
    raise UserError(*(f"{source}: {line}" if source else line for line in problems))


def read_ds_config(path: Path, key: str = "strategy.ds_config") -> dict[str, Any]:
    """DeepSpeed's document, which `key` names. Raises UserError where it is missing or no JSON object."""
    return read_mapping(path, parse_json, f"{key}: {path}", "a JSON object")


def set_once(overrides: Sequence[str]) -> list[str]:
    """The values of `--set`. Raises UserError for a repeated key."""
    keys = [override.partition("=")[0] for override in overrides]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise UserError(*(f"--set has {key[:80]} {keys.count(key)} times; give it once" for key in twice))
    return list(overrides)


def with_option(overrides: Sequence[str], option: str, values: Mapping[str, object]) -> list[str]:
    """The overrides, with the keys of an option. Raises UserError for a key that `--set` has too."""
    keys = [override.partition("=")[0] for override in overrides]
    if both := [key for key in values if key in keys]:
        raise UserError(*(f"{option} and --set {key} set the same key; leave one of them out" for key in both))
    return [*(f"{key}={value}" for key, value in values.items()), *overrides]


def with_ds_config(overrides: Sequence[str], ds_config: Path | None) -> list[str]:
    """`--ds-config FILE` as overrides."""
    if ds_config is None:
        return list(overrides)
    return with_option(overrides, "--ds-config", {"strategy.engine": "deepspeed", "strategy.ds_config": ds_config})


def with_grace(overrides: Sequence[str], grace: float | None) -> list[str]:
    """`--grace SECONDS` as an override."""
    return list(overrides) if grace is None else with_option(overrides, "--grace", {"train.grace": grace})


def _with_strategy(document: dict[str, Any], world_size: int | None) -> dict[str, Any]:
    """The document with `world_size` and the contents of the DeepSpeed file that its strategy names."""
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
                f"{'runs' if world_size == 1 else 'run'} (WORLD_SIZE); start that many, set it to {world_size}, or "
                "leave it out"
            )
    return document | {"strategy": strategy}


def _apply(document: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found or not key:
        raise UserError(f"--set expects key.path=value, such as train.steps=100, and {override[:80]!r} was found")
    if (dotted := re.sub(r"\[(\d+)\]", r".\1", key)) != key:
        raise UserError(f"--set {override[:80]}: numbers of a list follow a dot; write {dotted[:80]}={text[:40]}")
    *parents, last = key.split(".")
    node: Any = document
    for parent in parents:
        node = _within(node, parent, override)
        if not isinstance(node, dict | list):
            fix = "; write it as a list in the YAML: images: [{path: FOLDER}]" if parent == "images" else ""
            raise UserError(f"--set {override[:80]}: {parent} is a value, and has no keys{fix}")
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
    """The value at a key of a mapping, a new section where it has none; or at a number of a list."""
    if isinstance(node, dict):
        return node.setdefault(key, {})
    if not key.isdecimal() or int(key) >= len(node):
        raise UserError(f"--set {override[:80]}: {key[:20]} is no number of a list of {len(node)}, from 0 on")
    return node[int(key)]


MOST_MICRO_BATCH = 1024
"""The largest micro-batch that may be asked for; the search ends at 512."""
MOST_RANK = 8192
"""The largest rank of adapters: no layer here is wider, and a larger rank adds nothing."""

_HOST = {"device": "cpu", "pin_memory": True}
# Buckets of 5e7 elements: DeepSpeed's own 5e8 cost up to 1.9 GiB, and models here are a few blocks of 1e7.
_ZERO = {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
PRESETS: dict[str, dict[str, Any]] = {
    "single": {"engine": "single"},
    "ddp": {"engine": "ddp"},
    **{
        f"zero{stage}": {"engine": "deepspeed", "ds_config": {"zero_optimization": {"stage": stage, **_ZERO}}}
        for stage in range(4)
    },
    **{
        f"zero{stage}-offload": {
            "engine": "deepspeed",
            "ds_config": {"zero_optimization": {"stage": stage, **_ZERO, "offload_optimizer": _HOST}},
        }
        for stage in (2, 3)
    },
    "zero3-offload-all": {
        "engine": "deepspeed",
        "ds_config": {"zero_optimization": {"stage": 3, **_ZERO, "offload_optimizer": _HOST, "offload_param": _HOST}},
    },
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-offload": {"engine": "fsdp2", "cpu_offload": True},
}
"""Engines by their usual names; keys of a Strategy may be added to them."""


def parse_strategy(texts: Sequence[str]) -> Strategy:
    """The Strategy of presets, `key=value` pairs (dots descend) and YAML files, later ones over earlier ones. Keys are
    those of `Strategy`; `ds_config` is a file or a document. Raises UserError with all problems."""
    document: dict[str, Any] = {}
    for text in texts:
        parts = _split(text)
        _check_once(parts)
        for part in parts:
            _add(document, part)
    if isinstance(document.get("ds_config"), str):
        document["ds_config"] = read_ds_config(Path(document["ds_config"]))
    if document.get("engine") == "deepspeed":
        document.setdefault("ds_config", {})
    try:
        strategy = Strategy.model_validate(document)
    except ValidationError as error:
        raise UserError(*(f"--strategy: {line}" for line in wrong(error, document, Strategy))) from None
    return _within_bounds(strategy)


def _split(text: str) -> list[str]:
    """Parts at commas that are not within brackets."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _check_once(parts: Sequence[str]) -> None:
    """Raise UserError for a repeated key."""
    seen: dict[str, str] = {}
    for part in parts:
        key, found, _ = (each.strip() for each in part.partition("="))
        if found and key in seen:
            raise UserError(f"--strategy has {seen[key]} and {part}; leave one of them out")
        seen[key] = part


def _add(document: dict[str, Any], part: str) -> None:
    key, found, text = part.partition("=")
    if found:
        *parents, last = key.strip().split(".")
        node = document
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise UserError(f"--strategy {part}: {parent} is a value, and has no keys")
        node[last] = _yaml(text, part)
    elif part in PRESETS:
        document.update(_copied(PRESETS[part]))
    elif part.endswith((".yaml", ".yml", ".json")):
        path = Path(part)
        document.update(
            read_mapping(path, parse_yaml, f"--strategy {path}: the file", "keys of a strategy, such as engine")
        )
    else:
        raise UserError(f"--strategy {part}: neither key=value, a YAML file nor a preset; {nearest(part, PRESETS)}")


def _yaml(text: str, part: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"--strategy {part[:80]}: the value is {error}") from None


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def _within_bounds(strategy: Strategy) -> Strategy:
    """Raise UserError for sizes that plans reject too."""
    rank = 0 if strategy.lora is None else strategy.lora.rank
    bounds = {
        "micro_batch_size": (strategy.micro_batch_size, MOST_MICRO_BATCH),
        "lora.rank": (rank, MOST_RANK),
    }
    problems = [
        f"--strategy: {key} is {value}, and {most} or less was expected"
        for key, (value, most) in bounds.items()
        if value > most
    ]
    if problems:
        raise UserError(*problems)
    return strategy
