"""The commands, one file each, and options that several share. A command parses its options and calls the layers below,
which import torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from bigdit.errors import UserError

EXIT_DOES_NOT_FIT = 2

T = TypeVar("T")
R = TypeVar("R")

Config = Annotated[
    Path,
    typer.Option("--config", metavar="FILE", help="The run's YAML. Its paths are relative to the current folder."),
]


def _set_once(overrides: list[str]) -> list[str]:
    from bigdit.config.load import set_once

    return set_once(overrides)


Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a config key; repeatable.", callback=_set_once),
]
StageOption = Annotated[
    int | None, typer.Option("--stage", min=0, metavar="N", help="Stage of a run with stages; the first is 0.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A model of `bigdit models`, by name or repository; or a diffusers config.json or folder.",
    ),
]
GpuOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="A GPU of `bigdit gpus`, a MIG slice (GPU:PROFILE), or auto for this machine's."),
]
Resolution = Annotated[
    str | None,
    typer.Option(metavar="PIXELS", help="1024, or 480x832 (height x width). Default: the model's own."),
]
Frames = Annotated[int | None, typer.Option(metavar="N", help="Frames of a video. Default: the model's own.")]
EmaWidth = Annotated[
    float | None,
    typer.Option(metavar="WIDTH", help="Use the EMA of this width, computed from snapshots (train.snapshot_every)."),
]


def with_options(options: type[T]) -> Callable[[Callable[[T], R]], Callable[..., R]]:
    """Give a command, which takes an instance of a dataclass, an option for each of its fields."""

    def decorate(command: Callable[[T], R]) -> Callable[..., R]:
        def run(**values: Any) -> R:
            return command(options(**values))

        own = fields(options)  # type: ignore[arg-type]  # a dataclass
        defaults = {each.name: each.default_factory() for each in own if callable(each.default_factory)}
        found = inspect.signature(options, eval_str=True).parameters
        named = [each.replace(default=defaults.get(name, each.default)) for name, each in found.items()]
        run.__doc__, run.__signature__ = command.__doc__, inspect.Signature(named)  # type: ignore[attr-defined]
        return run

    return decorate


def parse_numbers(option: str, text: str, what: str, largest: int) -> list[int]:
    """The distinct numbers in `text`. Raises UserError for anything else; `what`: the expected form, such as
    `sizes such as 1,2,4,8`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= largest for number in numbers):
        raise UserError(f"{option} expects {what}, each from 1 to {largest}, and {text[:40]!r} was found")
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise UserError(f"{option} {text[:40]} has {twice[0]} twice; remove one of them")
    return numbers
