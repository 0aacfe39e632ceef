"""What is said beside a run's YAML: `--set`, and options that stand for a key; each key once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bigdit.errors import UserError


def said_once(overrides: Sequence[str]) -> list[str]:
    """What `--set` was given. Raises UserError for a key that it says twice."""
    keys = _keys(overrides)
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise UserError(*(f"--set says {key[:80]} {keys.count(key)} times; leave it once" for key in twice))
    return list(overrides)


def with_option(overrides: Sequence[str], option: str, values: Mapping[str, object]) -> list[str]:
    """The overrides with what an option stands for. Raises UserError for a key that `--set` says too."""
    if both := [key for key in values if key in _keys(overrides)]:
        raise UserError(*(f"{option} and --set {key} say the same key; leave one of them out" for key in both))
    return [*(f"{key}={value}" for key, value in values.items()), *overrides]


def _keys(overrides: Sequence[str]) -> list[str]:
    return [override.partition("=")[0] for override in overrides]
