"""Options that several commands share, worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", help="The run's YAML.")]


def _said_once(overrides: list[str]) -> list[str]:
    from bigdit.config.overrides import said_once

    return said_once(overrides)


Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a config key; repeatable.", callback=_said_once),
]
Stage = Annotated[
    int | None, typer.Option("--stage", min=0, metavar="N", help="Of a run with stages this one, from 0 on.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

_MODEL = typer.Option(
    metavar="NAME",
    help="A model of `bigdit models`, by its name or repository; or a config.json or a folder of diffusers.",
)
Model = Annotated[str, _MODEL]
MaybeModel = Annotated[str | None, _MODEL]
Gpu = Annotated[
    str,
    typer.Option(metavar="NAME", help="A card of `bigdit gpus`; CARD:PROFILE, a MIG slice; auto, this machine's."),
]
RESOLUTION = "1024, or 480x832 (height x width); the model's own if left out."
Resolution = Annotated[str | None, typer.Option(metavar="PIXELS", help=RESOLUTION)]
Frames = Annotated[int | None, typer.Option(metavar="N", help="Frames of a video; the model's own if left out.")]
# What a plan is asked.
GpuMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The card's used + free in nvidia-smi, such as 45416MiB.")
]
Reserve = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="GPU memory to keep free, 1GiB or 0; if left out 512MiB for a display, 0 for data-centre GPUs.",
    ),
]
Gpus = Annotated[int | None, typer.Option(metavar="N", help="Cards in all; 1 if left out.")]
GpusPerNode = Annotated[int | None, typer.Option(metavar="N", help="Cards in a machine; 8 if left out.")]
Network = Annotated[
    float | None, typer.Option(metavar="GB/S", help="10^9 bytes a second between machines; 12.5 if left out.")
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Of one machine: 128GiB; this one's for --gpu auto, else assumed by the kind of GPU."
    ),
]
Resolutions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PIXELS",
        help=f"{RESOLUTION} Of several, with commas or by repetition, the first decides, and the others are buckets.",
    ),
]
Buckets = Annotated[
    str | None,
    typer.Option(
        metavar="PIXELS",
        help="Further sizes whose largest micro-batch is wanted, or none; of pictures the usual aspect ratios, if "
        "left out (aspect).",
    ),
]
GlobalBatch = Annotated[int | None, typer.Option(metavar="N", help="Samples in an optimizer step over all cards.")]
Images = Annotated[
    str | None, typer.Option(metavar="N", help="Samples of the data set: 250000, 1.5k, 30M; for time and disk.")
]
Epochs = Annotated[float | None, typer.Option(metavar="N", help="How often each is trained on; once if left out.")]
Price = Annotated[float | None, typer.Option(metavar="MONEY", help="Of one card for an hour, in your currency.")]
Receipts = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Receipts of measured runs, to calibrate the speed by.")
]
Engine = Annotated[
    str | None, typer.Option(metavar="NAME", help="Fix the engine: single, zero0 to zero3, zero2-offload, fsdp2, …")
]
Optimizer = Annotated[str | None, typer.Option(metavar="NAME", help="Fix the optimizer: adamw, adamw_8bit, came, …")]
Precision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Fix the precision: bf16, bf16_sr, fp16, tf32, fp32.")
]
Ema = Annotated[
    str | None, typer.Option(metavar="PLACE", help="Keep a moving average: auto, gpu or cpu; none if left out.")
]
EmaWidth = Annotated[
    float | None,
    typer.Option(metavar="WIDTH", help="The average of this width, made from snapshots (train.snapshot_every)."),
]
EmaWidths = Annotated[
    str | None, typer.Option(metavar="W,W", help="Keep averages by power functions of these widths: 0.05,0.1.")
]
Lora = Annotated[int | None, typer.Option(metavar="RANK", help="Train adapters of this rank.")]
Features = Annotated[
    str | None, typer.Option(metavar="WHEN", help="cached (if left out), or online: encode while training.")
]
FromScratch = Annotated[
    bool | None, typer.Option("--from-scratch", help="Train from random weights: run.yaml names none to start from.")
]
Full = Annotated[bool | None, typer.Option("--full", help="Train all weights: propose no adapters instead.")]
