"""`bigdit bench memory`: memory against micro-batch, on an emulated GPU or on this machine's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit.commands.options import Frames, Gpu, Json, Model, Resolution, listed

if TYPE_CHECKING:
    from bigdit import catalog
    from bigdit.strategy import Strategy

LARGEST = 65_536
"""Micro-batch sizes beyond this are a slip of the pen."""

STEPS = 5
"""Timed at a point."""


def run(
    model: Model,
    gpu: Gpu,
    micro_batch: Annotated[
        str, typer.Option(metavar="N,N,…", help="Sizes, from the smallest on until one runs out of memory.")
    ] = "1,2,4,8,16",
    strategy: Annotated[
        list[str],
        typer.Option(help="Presets, key=value and YAML files with commas: zero2,world_size=8; a curve a --strategy."),
    ] = ["single"],  # noqa: B006  # typer reads the default; it is not changed
    resolution: Resolution = None,
    frames: Frames = None,
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Cap the process, such as 46068MiB: a smaller GPU's bytes.")
    ] = None,
    segments: Annotated[
        bool,
        typer.Option("--expandable-segments/--default-allocator", help="How torch's allocator is set."),
    ] = True,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Timed steps a point, on a real GPU; 5 if left out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write memory.json, .md, .png and .html to DIR.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Memory against micro-batch, until one runs out: emulated; with --gpu auto measured beside that."""
    from bigdit.emulator.interpreter import cuda_python

    cuda_python()  # first, so that a missing one is said at once
    from bigdit import catalog, log
    from bigdit.bench.memory import MemoryBenchmark
    from bigdit.config.load import parse_strategy
    from bigdit.files import check_writable
    from bigdit.profile.attempt import parse_resolution
    from bigdit.report.bench import note, retried, subtitle, tables, title, write_memory

    sizes = listed("--micro-batch", micro_batch, "sizes such as 1,2,4,8", LARGEST)
    strategies = [(text, parse_strategy([text])) for text in strategy]
    _check_strategies(strategies)
    own, card = gpu.strip().casefold() == "auto", catalog.resolve_gpu(gpu)
    _check_timed(steps, own)
    limit_bytes = None if limit is None else _limit(limit, card)
    for notice in {each.plan_notice for _, each in strategies if not own and each.plan_notice}:
        log.notice(f"note: {notice}")
    if out is not None:
        check_writable("--out", out)
    with log.err.status(f"running {model}") as status:
        found = MemoryBenchmark(
            catalog.find_model(model),
            card,
            own=own,
            resolution=None if resolution is None else parse_resolution(resolution),
            frames=frames,
            limit_bytes=limit_bytes,
            expandable_segments=segments,
            steps=STEPS if steps is None else steps,
            said=status.update,
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
        typed = _typed(model, gpu, micro_batch, strategy, resolution, frames, limit, segments, steps)
        log.notice(f"wrote {out}: {', '.join(file.name for file in write_memory(found, out, typed))}")


def _check_strategies(strategies: Sequence[tuple[str, Strategy]]) -> None:
    """Raise UserError where a strategy says a size, beside those of --micro-batch, and where two are one."""
    from bigdit.errors import UserError

    wrong = [
        f"--strategy {text} says micro_batch_size, and each is run at the sizes of --micro-batch; leave it out there"
        for text, strategy in strategies
        if "micro_batch_size" in strategy.model_fields_set
    ]
    seen: dict[str, str] = {}
    for text, strategy in strategies:
        before = seen.setdefault(strategy.digest(), text)
        if before is not text:
            twice = f"--strategy {text} is said twice" if before == text else f"--strategy {text} is {before} again"
            wrong.append(f"{twice}; leave one of them out")
    if wrong:
        raise UserError(*wrong)


def _check_timed(steps: int | None, own: bool) -> None:
    """Raise UserError where steps are to be timed on an emulated GPU."""
    from bigdit.emulator import on_emulated_gpu
    from bigdit.errors import UserError

    if steps is not None and (not own or on_emulated_gpu()):
        raise UserError(f"--steps {steps} are timed on a real GPU (--gpu auto), and this one is emulated; leave it out")


def _limit(text: str, card: catalog.Gpu) -> int:
    from bigdit.errors import UserError
    from bigdit.units import MIB, gib, parse_bytes

    try:
        found = parse_bytes(text)
    except UserError as error:
        raise UserError(f"--limit: {error}") from None
    if found < MIB:
        raise UserError(f"--limit {text} is less than 1 MiB; write the bytes of a GPU, such as 46068MiB")
    if found > card.usable_bytes:
        raise UserError(
            f"--limit {text} is more than the {card.title} has, {gib(card.usable_bytes)}; leave it out, or name a "
            "larger GPU"
        )
    return found


def _typed(
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
    """The command that asks the same again."""
    import shlex

    given = {"model": model, "gpu": gpu, "micro-batch": micro_batch}
    more = {"resolution": resolution, "frames": frames, "limit": limit, "steps": steps}
    options = [*given.items(), *(("strategy", each) for each in strategy)]
    options += [(name, str(value)) for name, value in more.items() if value is not None]
    words = [word for name, value in options for word in (f"--{name}", value)]
    return shlex.join(["bigdit", "bench", "memory", *words, *([] if segments else ["--default-allocator"])])
