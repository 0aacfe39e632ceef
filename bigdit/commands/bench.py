"""`bigdit bench`: memory against micro-batch on any GPU, and measured steps of a run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit import log
from bigdit.commands import Config, Frames, GpuOption, Json, Model, Resolution, Set, StageOption, parse_numbers
from bigdit.errors import UserError
from bigdit.files import check_writable
from bigdit.units import MIB, gib, parse_bytes, parse_resolution

if TYPE_CHECKING:
    from bigdit import catalog
    from bigdit.receipt import Receipt
    from bigdit.strategy import Strategy

HELP = "Benchmark memory against micro-batch size, or a run's training step on this machine."

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)

LARGEST = 65_536
"""Larger micro-batch sizes are a typing error."""

STEPS = 5
"""Timed steps at each point."""


@app.command()
def memory(
    model: Model,
    gpu: GpuOption,
    micro_batch: Annotated[
        str,
        typer.Option(metavar="N,N,…", help="Micro-batch sizes, run from the smallest on until memory runs out."),
    ] = "1,2,4,8,16",
    strategy: Annotated[
        list[str],
        typer.Option(
            metavar="SETTINGS",
            help="Presets, key=value and YAML files: zero2,world_size=8; repeatable, with a curve for each.",
        ),
    ] = ["single"],  # noqa: B006  # typer reads the default; it is not changed
    resolution: Resolution = None,
    frames: Frames = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Limit the process to this memory, as on a smaller GPU: 46068MiB."),
    ] = None,
    segments: Annotated[
        bool,
        typer.Option("--expandable-segments/--default-allocator", help="Setting of torch's allocator."),
    ] = True,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Timed steps at each point, on a real GPU. Default: 5.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write memory.json, .md, .png and .html to DIR.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show memory against micro-batch size on an emulated GPU; with --gpu auto also measured on this machine's."""
    from bigdit.emulator.interpreter import cuda_python

    cuda_python()  # first: a missing one is an error at once
    from bigdit import catalog
    from bigdit.bench.memory import MemoryBenchmark
    from bigdit.config.strategy_text import parse_strategy
    from bigdit.report.bench import note, retried, subtitle, tables, title, write_memory

    sizes = parse_numbers("--micro-batch", micro_batch, "sizes such as 1,2,4,8", LARGEST)
    strategies = [(text, parse_strategy([text])) for text in strategy]
    _check_strategies(strategies)
    own, device = gpu.strip().casefold() == "auto", catalog.resolve_gpu(gpu)
    _check_timed(steps, own)
    limit_bytes = None if limit is None else _parse_limit(limit, device)
    if out is not None:
        check_writable("--out", out)
    with log.err.status(f"running {model}") as status:
        found = MemoryBenchmark(
            catalog.find_model(model),
            device,
            own=own,
            resolution=None if resolution is None else parse_resolution(resolution),
            frames=frames,
            limit_bytes=limit_bytes,
            expandable_segments=segments,
            steps=STEPS if steps is None else steps,
            progress=status.update,
        ).curves(strategies, sizes)
    if as_json:
        log.emit_json(found.model_dump(mode="json"))
    else:
        log.out.print(f"[bold]{title(found)}[/bold]", highlight=False)
        log.out.print(subtitle(found), highlight=False)
        for each, curve in zip(tables(found), found.curves, strict=True):
            log.out.print()
            log.out.print(each)
            for line in retried(curve):
                log.out.print(line, highlight=False)
        log.out.print()
        log.out.print(note(found), highlight=False)
    if out is not None:
        typed = _command_line(model, gpu, micro_batch, strategy, resolution, frames, limit, segments, steps)
        log.notice(f"wrote {out}: {', '.join(file.name for file in write_memory(found, out, typed))}")


def _check_strategies(strategies: Sequence[tuple[str, Strategy]]) -> None:
    """Raise UserError if a strategy sets a micro-batch size, or two are the same."""
    wrong = [
        f"--strategy {text} sets micro_batch_size, and --micro-batch has the sizes; leave it out there"
        for text, strategy in strategies
        if "micro_batch_size" in strategy.model_fields_set
    ]
    seen: dict[str, str] = {}
    for text, strategy in strategies:
        if before := seen.get(strategy.digest()):
            twice = "given twice" if before == text else f"the same as {before}"
            wrong.append(f"--strategy {text} is {twice}; leave one of them out")
        seen.setdefault(strategy.digest(), text)
    if wrong:
        raise UserError(*wrong)


def _check_timed(steps: int | None, own: bool) -> None:
    """Raise UserError for timed steps on an emulated GPU."""
    from bigdit.emulator import on_emulated_gpu

    if steps is not None and (not own or on_emulated_gpu()):
        raise UserError(f"--steps {steps} needs a real GPU (--gpu auto), and this one is emulated; leave it out")


def _parse_limit(text: str, device: catalog.Gpu) -> int:
    try:
        found = parse_bytes(text)
    except UserError as error:
        raise UserError(f"--limit: {error}") from None
    if found < MIB:
        raise UserError(f"--limit {text} is less than 1 MiB; write the bytes of a GPU, such as 46068MiB")
    if found > device.usable_bytes:
        raise UserError(
            f"--limit {text} is more than the {device.title} has, {gib(device.usable_bytes)}; leave it out, or name a "
            "larger GPU"
        )
    return found


def _command_line(
    model: str,
    gpu: str,
    micro_batch: str,
    strategy: list[str],
    resolution: str | None,
    frames: int | None,
    limit: str | None,
    segments: bool,
    steps: int | None,
) -> str:
    """The command line for this benchmark."""
    import shlex

    given = {"model": model, "gpu": gpu, "micro-batch": micro_batch}
    more = {"resolution": resolution, "frames": frames, "limit": limit, "steps": steps}
    options = [*given.items(), *(("strategy", each) for each in strategy)]
    options += [(name, str(value)) for name, value in more.items() if value is not None]
    words = [word for name, value in options for word in (f"--{name}", value)]
    return shlex.join(["bigdit", "bench", "memory", *words, *([] if segments else ["--default-allocator"])])


@app.command()
def step(
    config: Config,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    stage: StageOption = None,
    steps: Annotated[int, typer.Option(min=3, metavar="N", help="Steps; the first two are not timed.")] = 8,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the receipt to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a run's step in one process on this machine, and compare time and memory with the prediction.

    Steps are interleaved with those of a plain PyTorch loop: the same model, values, batches, precision, loss and
    optimizer, and no engine.
    """
    from bigdit import libraries
    from bigdit.train.prepare import prepare

    libraries.prepare()
    from bigdit.catalog.families import objective_of
    from bigdit.config.check import check_store
    from bigdit.config.stages import load_run
    from bigdit.receipt import keep, write

    one_process = ["strategy.engine=single", "strategy.world_size=1", "strategy.ds_config=null"]
    run_config = load_run(config, [*overrides, *one_process], stage)
    spec, strategy = prepare(run_config), run_config.strategy
    check_store(run_config.data)
    from bigdit.bench.step import bench_step
    from bigdit.report.bench import comparison_table, load_line, overhead, print_notes
    from bigdit.store import FeatureStore
    from bigdit.train.data import largest_batch_shape

    shape = largest_batch_shape(FeatureStore.open(run_config.data.store))
    objective = objective_of(spec, run_config.objective)
    found = bench_step(spec, shape, strategy, objective, steps=steps, seed=run_config.train.seed)
    receipt, compared = found.receipt, found.compared
    if as_json:
        plain = None if compared is None else compared.model_dump(mode="json")
        log.emit_json(receipt.model_dump(mode="json") | {"compared": plain})
    else:
        if compared is not None:
            log.out.print(load_line(compared.load), highlight=False)
        _print_receipt(receipt)
        log.out.print()
        if compared is not None:
            log.out.print(comparison_table(compared))
            ratio = compared.contenders[1].of_baseline
            assert ratio is not None  # only the baseline has none
            shown = "unknown, because this machine is busy" if compared.load.busy else overhead(ratio)
            log.out.print(f"overhead of bigdit's step: {shown}", highlight=False)
            print_notes(compared)
        else:
            log.out.print(f"not compared with a plain loop: {found.alone}", highlight=False)
    if out is None:
        keep(receipt)
    else:
        write(receipt, out)
        log.notice(f"wrote {out}")


def _print_receipt(receipt: Receipt) -> None:
    from bigdit.report.tables import table

    where = f"an emulated {receipt.device}" if receipt.emulated else receipt.device
    rows = table(f"one process on {where}, micro-batch {receipt.strategy.micro_batch_size}", ["", "value"])
    found = {
        "peak, predicted": receipt.predicted_peak_allocated_bytes,
        "peak, measured": receipt.measured_peak_allocated_bytes,
        "reserved, predicted": receipt.predicted_peak_reserved_bytes,
        "reserved, measured": receipt.measured_peak_reserved_bytes,
    }
    for name, nbytes in found.items():
        if nbytes is not None:
            by = f"; {receipt.measured_with}" if name == "peak, measured" else ""
            rows.add_row(name, f"{gib(nbytes)} ({nbytes} bytes{by})")
    if receipt.error_percent is not None:
        rows.add_row("peak off by", f"{receipt.error_percent} %")
    if not receipt.emulated:  # emulated kernels do not run
        rows.add_row("a step", f"{receipt.seconds_per_step} s, {receipt.samples_per_second} samples/s")
    log.out.print(rows)
