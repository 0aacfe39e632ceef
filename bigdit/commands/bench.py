"""`bigdit bench`: what a step takes, run for real or on a card that is not there, against its rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit.commands.options import Config, Json, Set

if TYPE_CHECKING:
    from bigdit.bench.memory import Device
    from bigdit.catalog import Gpu

LARGEST = 65_536
"""Micro-batch sizes beyond this are a slip of the pen."""

HELP = "What a step takes: memory against micro-batch on any card, and the run's own step on this machine."

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)


@app.command()
def memory(
    model: Annotated[str, typer.Option(metavar="NAME", help="A model of `bigdit models`, or a diffusers config.json.")],
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="A card of `bigdit gpus`, a MIG slice, or auto: this machine's own.")
    ],
    micro_batch: Annotated[
        str, typer.Option(metavar="N,N,…", help="Sizes, from the smallest on until one runs out of memory.")
    ] = "1,2,4,8,16",
    strategy: Annotated[
        list[str],
        typer.Option(help="Presets, key=value and YAML files with commas: zero2,world_size=8; a curve a --strategy."),
    ] = ["single"],  # noqa: B006  # typer reads the default; it is not changed
    resolution: Annotated[
        str | None,
        typer.Option(metavar="PIXELS", help="1024 or 480x832 (height x width); the model's own if left out."),
    ] = None,
    frames: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Frames of a video; the model's own if left out.")
    ] = None,
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Cap the process, such as 46068MiB: a smaller card's bytes.")
    ] = None,
    segments: Annotated[
        bool,
        typer.Option("--expandable-segments/--default-allocator", help="How torch's allocator is set."),
    ] = True,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Timed steps a point, on a real card.")] = 5,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help="measured on this machine's card, the default for --gpu auto; else emulated, or rehearsed where there "
            "is no CUDA build of torch.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write memory.json, .md, .png and .html to DIR.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Memory against micro-batch: each point in a process of its own, beside its prediction, until one runs out."""
    from bigdit import catalog, log
    from bigdit.bench.memory import MemoryBenchmark
    from bigdit.config.strategy import parse_strategy
    from bigdit.rehearse.ask import parse_resolution
    from bigdit.report.memory import NOTE, make_folder, subtitle, tables, title, write_memory

    sizes = _sizes(micro_batch)
    strategies = [(text, parse_strategy([text])) for text in strategy]
    where, card = _device(device, gpu), catalog.resolve_gpu(gpu)
    limit_bytes = None if limit is None else _limit(limit, card)
    if out is not None:
        make_folder(out)
    with log.err.status(f"rehearsing {model}") as status:
        found = MemoryBenchmark(
            catalog.find_model(model),
            card,
            where,
            resolution=None if resolution is None else parse_resolution(resolution),
            frames=frames,
            limit_bytes=limit_bytes,
            expandable_segments=segments,
            steps=steps,
            said=status.update,
        ).curves(strategies, sizes)
    if as_json:
        log.emit_json(found.model_dump(mode="json"))
    else:
        log.out.print(f"[bold]{title(found)}[/bold]", highlight=False)
        log.out.print(subtitle(found), highlight=False)
        for each in tables(found):
            log.out.print()
            log.out.print(each)
        log.out.print()
        log.out.print(NOTE, highlight=False)
    if out is not None:
        typed = _typed(model, gpu, micro_batch, strategy, resolution, frames, limit, segments, device)
        log.notice(f"wrote {out}: {', '.join(file.name for file in write_memory(found, out, typed))}")


def _sizes(text: str) -> list[int]:
    from bigdit.errors import UserError

    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size <= LARGEST for size in sizes):
        raise UserError(
            f"--micro-batch expects sizes such as 1,2,4,8, each from 1 to {LARGEST}, and {text[:40]!r} was found"
        )
    return sizes


def _limit(text: str, card: Gpu) -> int:
    from bigdit.errors import UserError
    from bigdit.units import MIB, gib, parse_bytes

    try:
        found = parse_bytes(text)
    except UserError as error:
        raise UserError(f"--limit: {error}") from None
    if found < MIB:
        raise UserError(f"--limit {text} is less than 1 MiB; write the bytes of a card, such as 46068MiB")
    if found > card.usable_bytes:
        raise UserError(
            f"--limit {text} is more than the {card.title} has, {gib(card.usable_bytes)}; leave it out, or name a "
            "larger card"
        )
    return found


def _device(asked: str | None, gpu: str) -> Device:
    from bigdit.errors import UserError, shown
    from bigdit.search.ask import device_for

    own = gpu.strip().casefold() == "auto"
    if asked not in (None, "measured", "emulated", "rehearsed"):
        raise UserError(f"--device is {shown(asked)}; it may be measured, emulated or rehearsed")
    if asked == "measured" and not own:
        raise UserError(
            f"--device measured runs on this machine's own card, and --gpu is {shown(gpu)}; give --gpu auto"
        )
    return "measured" if own and asked in (None, "measured") else device_for(asked)[0]


def _typed(
    model: str,
    gpu: str,
    micro_batch: str,
    strategy: list[str],
    resolution: str | None,
    frames: int | None,
    limit: str | None,
    segments: bool,
    device: str | None,
) -> str:
    """The command that asks the same again."""
    import shlex

    given = {"model": model, "gpu": gpu, "micro-batch": micro_batch}
    more = {"resolution": resolution, "frames": frames, "limit": limit, "device": device}
    options = [*given.items(), *(("strategy", each) for each in strategy)]
    options += [(name, str(value)) for name, value in more.items() if value is not None]
    words = [word for name, value in options for word in (f"--{name}", value)]
    return shlex.join(["bigdit", "bench", "memory", *words, *([] if segments else ["--default-allocator"])])


@app.command()
def step(
    config: Config,
    overrides: Set = [],  # noqa: B006
    steps: Annotated[int, typer.Option(min=3, help="Real steps; the first two are not timed.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Write the receipt to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Run a run's step in one process on this machine: memory predicted and measured, time a step."""
    from bigdit import libraries, log

    libraries.prepare()
    from bigdit.bench.step import bench_step, largest_batch_shape
    from bigdit.config import load_run
    from bigdit.receipt import keep, write
    from bigdit.report.tables import table
    from bigdit.train.prepare import prepare
    from bigdit.units import gib

    one_process = ["engine.name=single", "engine.processes=1", "engine.ds_config=null"]
    run_config = load_run(config, [*overrides, *one_process])
    spec, strategy = prepare(run_config, 1)
    shape = largest_batch_shape(run_config.data.features)
    receipt = bench_step(spec, shape, strategy, run_config.objective, steps=steps, seed=run_config.train.seed)
    if as_json:
        log.emit_json(receipt.model_dump(mode="json"))
    else:
        predicted, measured = receipt.predicted_peak_allocated_bytes, receipt.measured_peak_allocated_bytes
        assert predicted is not None  # by the benchmark both are
        assert measured is not None
        card = f"an emulated {receipt.device}" if receipt.emulated else receipt.device
        rows = table(f"one process on {card}, micro-batch {strategy.micro_batch_size}", ["", "value"])
        rows.add_row("peak, rehearsed", f"{gib(predicted)} ({predicted} bytes)")
        rows.add_row("peak, measured", f"{gib(measured)} ({measured} bytes; {receipt.measured_with})")
        rows.add_row("off by", f"{receipt.error_percent} %")
        reserved = receipt.predicted_peak_reserved_bytes, receipt.measured_peak_reserved_bytes
        if reserved[0] is not None and reserved[1] is not None:
            rows.add_row("reserved, rehearsed", f"{gib(reserved[0])} ({reserved[0]} bytes)")
            rows.add_row("reserved, measured", f"{gib(reserved[1])} ({reserved[1]} bytes)")
        if not receipt.emulated:  # whose kernels are not run
            rows.add_row("a step", f"{receipt.seconds_per_step} s, {receipt.images_per_second} images/s")
        log.out.print(rows)
    if out is None:
        keep(receipt)
    else:
        write(receipt, out)
        log.notice(f"wrote {out}")
