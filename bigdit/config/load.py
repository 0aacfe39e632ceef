"""Read YAML, apply `--set a.b=c`, validate; every problem is one line that names its key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigdit.config.run import RunConfig
from bigdit.config.wrong import meant_within, wrong
from bigdit.dist import processes_here
from bigdit.documents import parse_json, parse_value, parse_yaml, read_mapping
from bigdit.errors import UserError
from bigdit.strategy import Strategy
from bigdit.units import how_many

_BEGIN = "`bigdit init` writes a run.yaml for a model, a GPU and a folder of images"


def read_run(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The document in `path` with its overrides, not yet validated. Raises UserError where it is no mapping."""
    if path.suffix.lower() == ".toml":
        raise UserError(f"the config {path} is TOML, as other trainers have it; {_BEGIN}")
    document = read_mapping(
        path, parse_yaml, f"the config {path}", "a mapping of sections such as model, data and train"
    )
    for override in overrides:
        _apply(document, override)
    return document


def parse_run(document: dict[str, Any], source: str = "", world_size: int | None = None) -> RunConfig:
    """Validate a document; `source` names it in errors. `world_size`: the number of processes that a launcher started.
    Raises UserError with all problems."""
    known = document.keys() & RunConfig.model_fields.keys()
    try:
        document = _with_strategy(document, world_size)
        return RunConfig.model_validate(document)
    except ValidationError as error:
        problems = wrong(error, document, RunConfig)
        if not known:  # of another trainer
            sections = ", ".join(name for name, field in RunConfig.model_fields.items() if field.is_required())
            problems = [f"it has none of {sections}; {_BEGIN}", *meant_within(document)]
    except UserError as error:
        problems = list(error.problems)
    raise UserError(*(f"{source}: {line}" if source else line for line in problems))


def read_ds_config(path: Path, key: str = "strategy.ds_config") -> dict[str, Any]:
    """DeepSpeed's document, which `key` names. Raises UserError where it is missing or no JSON object."""
    return read_mapping(path, parse_json, f"{key}: {path}", "a JSON object")


def set_once(overrides: Sequence[str]) -> list[str]:
    """The values of `--set`, with `images[0].` as `images.0.`. Raises UserError for a repeated key."""
    dotted = [re.sub(r"^[^=]*", lambda key: re.sub(r"\[(\d+)\]", r".\1", key[0]), each) for each in overrides]
    keys = [override.partition("=")[0] for override in dotted]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise UserError(*(f"--set has {key[:80]} {keys.count(key)} times; give it once" for key in twice))
    return dotted


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
            strategy = _without_machines(strategy, world_size)
    return document | {"strategy": strategy}


def _without_machines(strategy: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The strategy on fewer machines than planned, with the same global batch, and in HSDP fewer copies of the model.

    Micro-batches are no larger than the passes need. Raises UserError unless whole machines are missing.
    """
    here = processes_here()
    try:
        asked = Strategy.model_validate(strategy)
    except ValidationError:  # the run's own checks report it
        return strategy
    if here is None or world_size > asked.world_size or world_size % here or asked.world_size % here:
        raise UserError(other_processes(asked.world_size, world_size))
    if asked.dp_replicate > 1 and world_size % asked.dp_shard:
        raise UserError(
            f"strategy.dp_replicate is {asked.dp_replicate}, so {asked.dp_shard} GPUs hold a copy of the model, and "
            f"{world_size} of {asked.world_size} are there; start a multiple of {asked.dp_shard}"
        )
    return {key: value for key, value in strategy.items() if key != "global_batch_size"} | asked.over(world_size)


def other_processes(asked: object, world_size: int) -> str:
    """The error of a launcher that started another number of processes than the run needs."""
    return (
        f"strategy.world_size is {asked}, and {how_many(world_size, 'process')} "
        f"{'runs' if world_size == 1 else 'run'} (WORLD_SIZE); start that many, set it to {world_size}, or leave it out"
    )


def _apply(document: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found or not key:
        raise UserError(f"--set expects key.path=value, such as train.steps=100, and {override[:80]!r} was found")
    *parents, last = key.split(".")
    node: Any = document
    for number, parent in enumerate(parents):
        if parents[:number][-1:] == ["data"] and parent == "images" and [*parents, last][number + 1].isdecimal():
            _list_sources(node)
        node = _within(node, parent, override)
        if not isinstance(node, dict | list):
            fix = f"; write {override[:80].replace('.images.', '.images[0].')}" if parent == "images" else ""
            raise UserError(f"--set {override[:80]}: {parent} is a value, and has no keys{fix}")
    value = parse_value(text, f"--set {override[:80]}")
    if isinstance(node, list):
        _within(node, last, override)
        node[int(last)] = value
    else:
        node[last] = value


def _list_sources(data: dict[str, Any]) -> None:
    """Replace `images: FOLDER` by `images: [{path: FOLDER}]`, which has a number and keys."""
    found = data.get("images", [])
    sources = found if isinstance(found, list) else [found]
    data["images"] = [{"path": each} if isinstance(each, str) else each for each in sources]


def _within(node: Any, key: str, override: str) -> Any:
    """The value at a key of a mapping, a new section if it is missing; or at a number of a list."""
    if isinstance(node, dict):
        return node.setdefault(key, {})
    if not key.isdecimal() or int(key) >= len(node):
        raise UserError(f"--set {override[:80]}: {key[:20]} is no number of a list of {len(node)}, from 0 on")
    return node[int(key)]
