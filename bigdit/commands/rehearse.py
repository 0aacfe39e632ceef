"""`bigdit rehearse`: the memory of one strategy's training step, from the real step on a fake GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigdit.commands.options import Frames, Gpu, Json, Model, Resolution

if TYPE_CHECKING:
    from bigdit import catalog
    from bigdit.memory.footprint import Footprint
    from bigdit.rehearse import RehearsedSize, StepRequest

EXIT_DOES_NOT_FIT = 2


def run(
    model: Model,
    strategy: Annotated[
        list[str],
        typer.Option(help="Presets, key=value and YAML files: zero2,world_size=8,checkpointed_blocks=all; repeatable."),
    ] = ["single"],  # noqa: B006
    gpu: Gpu = "a100-80g-sxm",
    resolution: Resolution = None,
    frames: Frames = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory over time to this PNG.")] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write a pickle for PyTorch's page pytorch.org/memory_viz.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which the rehearsal is stopped.")] = 300.0,
    as_json: Json = False,
) -> int:
    """Rehearse two training steps on a fake GPU, and show what they take of a card, phase by phase."""
    from bigdit import catalog, log
    from bigdit.config.strategy import parse_strategy
    from bigdit.files import check_writable
    from bigdit.memory.footprint import footprint
    from bigdit.memory.process import beside_training
    from bigdit.profile.request import parse_resolution, request_for
    from bigdit.rehearse import rehearse

    for option, file in (("--plot", plot), ("--snapshot", snapshot)):
        if file is not None:
            check_writable(option, file.parent)
    card = catalog.resolve_gpu(gpu)
    request = request_for(
        catalog.find_model(model),
        card,
        parse_strategy(strategy),
        resolution=None if resolution is None else parse_resolution(resolution),
        frames=frames,
    )
    with log.err.status(f"rehearsing the training step of {request.model.name}"):
        found = rehearse(request, timeout_s=timeout).sizes[0]
    beside = beside_training(request.strategy, card.compute_capability, card.multiprocessors)
    taken = footprint(found.timeline, card.usable_bytes, beside)
    if as_json:
        log.emit_json(_document(request, found, taken, card))
    else:
        _show(request, found, taken, card)
    if plot is not None:
        from bigdit.report.timeline import plot_timeline

        plot_timeline(found.timeline, plot, title=_title(request, card), card_bytes=card.usable_bytes)
        log.notice(f"wrote {plot}")
    if snapshot is not None:
        from bigdit.memory.snapshot import write_snapshot

        write_snapshot(found.timeline, snapshot)
        log.notice(f"wrote {snapshot}")
    return 0 if taken.fits else EXIT_DOES_NOT_FIT


def _title(request: StepRequest, card: catalog.Gpu) -> str:
    strategy = request.strategy
    return f"{request.model.name}, {_engine(request)}, micro-batch {strategy.micro_batch_size}, on {card.title}"


def _engine(request: StepRequest) -> str:
    """`ZeRO-2 on 8 processes`, `FSDP2 2 × 4`, `one process`."""
    from bigdit.units import how_many

    strategy = request.strategy
    if strategy.engine == "single":
        return "one process"
    if strategy.engine == "deepspeed":
        return f"ZeRO-{strategy.zero_stage} on {how_many(strategy.world_size, 'process')}"
    if strategy.dp_replicate > 1:
        return f"HSDP {strategy.dp_replicate} × {strategy.dp_shard}"
    return f"FSDP2 on {how_many(strategy.world_size, 'process')}"


def _show(request: StepRequest, found: RehearsedSize, taken: Footprint, card: catalog.Gpu) -> None:
    from bigdit import log
    from bigdit.memory.host import host_memory
    from bigdit.report import ledger as report
    from bigdit.units import count, gib

    def say(line: str) -> None:
        log.out.print(line, highlight=False)

    say(f"[bold]{_title(request, card)}[/bold]")
    latents = " × ".join(map(str, request.batch.latents))
    tokens = "" if request.batch.text is None else f", text {' × '.join(map(str, request.batch.text))}"
    say(f"{count(found.params)} parameters; a sample: latents {latents}{tokens}")
    say(_policy(request))
    for table in (
        report.phases(found.ledger, taken.segments.on_card),
        report.at_peak(found.ledger),
        report.reserved(taken),
        report.process(taken),
    ):
        log.out.print()
        log.out.print(table)
    log.out.print()
    host = host_memory(found.host_timeline)
    say(
        f"host memory of this process, tensors alone: {gib(host.peak_bytes)}, page-locked {gib(host.page_locked_bytes)}"
    )
    for line in (*report.failures(taken), *found.notices):
        say(f"note: {line}")
    if taken.fits:
        say("[bold]fits[/bold], with the most that the process may take beside torch")
    else:
        say(f"[bold]does not fit[/bold]: {gib(taken.process.high_bytes)} wanted of {gib(taken.usable_bytes)}")


def _policy(request: StepRequest) -> str:
    """What the strategy says beside its engine, in one line."""
    strategy = request.strategy
    blocks = strategy.checkpointed_blocks
    parts: list[str] = [strategy.precision, strategy.optimizer.name]
    if strategy.optimizer.name == "adamw":
        parts[-1] += f" ({strategy.optimizer.implementation})"
    parts.append(f"checkpointed blocks: {blocks or 'none'}{', selective' if strategy.checkpointing != 'full' else ''}")
    parts += [f"accumulation {strategy.grad_accum_steps}"] if strategy.grad_accum_steps > 1 else []
    if strategy.ema:
        many = f"{strategy.ema.count} EMAs" if strategy.ema.count > 1 else "EMA"
        parts.append(f"{many} on the {strategy.ema.device}")
    parts += [f"LoRA {strategy.lora.rank} over {strategy.lora.base}"] if strategy.lora else []
    parts += ["compiled blocks"] if strategy.compile_blocks else []
    parts += ["optimizer in backward"] if strategy.optimizer_in_backward else []
    parts += ["activations offloaded"] if strategy.offload_activations else []
    parts += [f"{strategy.blocks_to_swap} blocks swapped"] if strategy.blocks_to_swap else []
    return f"{', '.join(parts)}, {strategy.features} features"


def _document(request: StepRequest, found: RehearsedSize, taken: Footprint, card: catalog.Gpu) -> dict[str, Any]:
    from bigdit.memory.host import host_memory

    timeline = found.timeline
    phases = [span.phase for span in timeline.spans]
    return {
        "model": request.model.name,
        "gpu": card.name,
        "params": found.params,
        "batch": request.batch.model_dump(mode="json"),
        "strategy": request.strategy.model_dump(mode="json"),
        "ledger": found.ledger.model_dump(mode="json")
        | {"deciding_phase": found.ledger.deciding.phase, "peak_allocated_bytes": found.ledger.peak_allocated_bytes},
        "footprint": taken.model_dump(mode="json")
        | {"process": taken.process.model_dump(mode="json"), "fits": taken.fits},
        "host": host_memory(found.host_timeline).model_dump(mode="json"),
        "collectives": [
            {"phase": phases[each.span], "name": each.name, "nbytes": each.nbytes, "group_size": each.group_size}
            for each in timeline.collectives
        ],
        "operators": [
            {
                "phase": phases[each.span],
                "operator": each.operator,
                "dtype": each.dtype,
                "place": each.place,
                "calls": each.calls,
                "flops": each.flops,
                "nbytes": each.nbytes,
            }
            for each in timeline.operators
        ],
        "notices": list(found.notices),
        "versions": found.versions,
    }
