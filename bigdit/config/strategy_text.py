"""A Strategy by itself: text such as `zero2,world_size=8,checkpointed_blocks=all`, or a YAML file of its keys."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigdit.config.load import read_ds_config
from bigdit.config.wrong import wrong
from bigdit.documents import parse_value, parse_yaml, read_mapping
from bigdit.errors import UserError, nearest
from bigdit.strategy import Strategy

LARGEST_MICRO_BATCH = 4096
"""The largest micro-batch that is searched, or may be requested."""


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
        node[last] = parse_value(text, f"--strategy {part[:80]}")
    elif part in PRESETS:
        document.update(copy.deepcopy(PRESETS[part]))
    elif part.endswith((".yaml", ".yml", ".json")):
        path = Path(part)
        document.update(
            read_mapping(path, parse_yaml, f"--strategy {path}: the file", "a mapping of keys such as engine")
        )
    else:
        raise UserError(f"--strategy {part}: neither key=value, a YAML file nor a preset; {nearest(part, PRESETS)}")


def _within_bounds(strategy: Strategy) -> Strategy:
    """The strategy. Raises UserError for a micro-batch that plans reject too."""
    size, most = strategy.micro_batch_size, LARGEST_MICRO_BATCH
    if size > most:
        raise UserError(f"--strategy: micro_batch_size is {size}, and {most} or less was expected")
    return strategy
