"""Options that several commands share, worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", help="The run's YAML.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a config key; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report to this JSON file too.")]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each, after a first that is not counted.")]

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A model of `bigdit models`, by its name or repository; or a config.json or a folder of diffusers.",
    ),
]
Gpu = Annotated[
    str,
    typer.Option(metavar="NAME", help="A card of `bigdit gpus`; CARD:PROFILE, a MIG slice; auto, this machine's."),
]
RESOLUTION = "1024, or 480x832 (height x width); the model's own if left out."
Resolution = Annotated[str | None, typer.Option(metavar="PIXELS", help=RESOLUTION)]
Frames = Annotated[int | None, typer.Option(metavar="N", help="Frames of a video; the model's own if left out.")]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="WHERE",
        help="Where strategies run: emulated, on emulated cards, the default where there is a CUDA build of torch; or "
        "rehearsed. `bench memory --gpu auto`: measured, on this machine's card, if left out.",
    ),
]
