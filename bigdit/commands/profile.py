"""`bigdit profile`: the memory of one strategy's training step on an emulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigdit import log
from bigdit.commands import EXIT_DOES_NOT_FIT, Frames, GpuOption, Json, Model, Resolution
from bigdit.errors import UserError
from bigdit.files import check_writable
from bigdit.units import count, gib, parse_resolution

if TYPE_CHECKING:
    from bigdit.memory.process import ByteRange
    from bigdit.profile.attempt import Profile, StepRequest


def run(
    model: Model,
    strategy: Annotated[
        list[str],
        typer.Option(
            metavar="SETTINGS",
            help="Presets, key=value and YAML files: zero2,world_size=8,checkpointed_blocks=all; repeatable.",
        ),
    ] = ["single"],  # noqa: B006
    gpu: GpuOption = "a100-80g-sxm",
    resolution: Resolution = None,
    frames: Frames = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot memory over time to this PNG.")] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write torch's memory snapshot to this file, for pytorch.org/memory_viz."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Stop after this many seconds.")] = 300.0,
    as_json: Json = False,
) -> int:
    """Run two training steps of one strategy on an emulated GPU, and show their memory by phase and by category."""
    from bigdit.emulator.interpreter import cuda_python

    cuda_python()  # first: a missing one is an error at once
    from bigdit import catalog
    from bigdit.config.strategy_text import parse_strategy
    from bigdit.memory.process import non_torch_memory_of
    from bigdit.profile.attempt import request_for
    from bigdit.profile.gpus import EmulatedGpus, of_config
    from bigdit.profile.pool import WorkerError

    for option, file in (("--plot", plot), ("--snapshot", snapshot)):
        if file is not None:
            check_writable(option, file.parent)
    device = catalog.resolve_gpu(gpu)
    asked = catalog.find_model(model)
    request = request_for(
        asked,
        device,
        parse_strategy(strategy),
        resolution=None if resolution is None else parse_resolution(resolution),
        frames=frames,
    )
    title = f"{request.model.name} on an emulated {device.title}: {','.join(strategy)}"
    with log.err.status(f"profiling {request.model.name}"), EmulatedGpus(device, 1, timeout_s=timeout) as emulated:
        try:
            found = emulated.profile(request, snapshot)
        except (UserError, WorkerError) as error:
            raise of_config(asked, [error]) from None
    non_torch = non_torch_memory_of(request.strategy, device)
    fits = found.peak_reserved_bytes + non_torch.high_bytes <= device.usable_bytes
    if as_json:
        shown = {"gpu": device.name, "emulated": emulated.build, "usable_bytes": device.usable_bytes, "fits": fits}
        log.emit_json(shown | _document(request, found, non_torch))
    else:
        log.out.print(title, style="bold", markup=False, highlight=False)
        _show(request, found, device.usable_bytes, non_torch)
        log.out.print("fits" if fits else "does not fit", style="bold")
    if plot is not None:
        from bigdit.report.figures import save, timeline_figure

        save(timeline_figure(found.timeline, title=title, gpu_bytes=device.usable_bytes), plot)
    for written in filter(None, (plot, snapshot)):
        log.notice(f"wrote {written}")
    return 0 if fits else EXIT_DOES_NOT_FIT


def _show(request: StepRequest, found: Profile, usable_bytes: int, non_torch: ByteRange) -> None:
    from bigdit.memory import host_memory
    from bigdit.report import plan as report

    def say(line: str) -> None:
        log.out.print(line, highlight=False)

    latents = " × ".join(map(str, request.batch.latents))
    tokens = "" if request.batch.text is None else f", text {' × '.join(map(str, request.batch.text))}"
    say(f"{count(found.params)} parameters; one sample: latents {latents}{tokens}")
    strategy = request.strategy
    say(f"micro-batch {strategy.micro_batch_size}, {strategy.precision}, {strategy.optimizer.name}")
    for table in (
        report.phases(found.ledger),
        report.at_peak(found.ledger),
        report.process(found.peak_reserved_bytes, non_torch, usable_bytes),
    ):
        log.out.print()
        log.out.print(table)
    log.out.print()
    host = host_memory(found.host_timeline)
    say(f"CPU memory of tensors: {gib(host.peak_bytes)}, page-locked {gib(host.page_locked_bytes)}")
    for line in found.notices:
        say(f"note: {line}")


def _document(request: StepRequest, found: Profile, non_torch: ByteRange) -> dict[str, Any]:
    from dataclasses import asdict

    from bigdit.memory import host_memory

    timeline, ledger = found.timeline, found.ledger
    phases = [span.phase for span in timeline.spans]
    reserved = found.peak_reserved_bytes
    return {
        "model": request.model.name,
        "params": found.params,
        "batch": request.batch.model_dump(mode="json"),
        "strategy": request.strategy.model_dump(mode="json"),
        "ledger": ledger.model_dump(mode="json")
        | {"deciding_phase": ledger.deciding.phase, "peak_allocated_bytes": ledger.peak_allocated_bytes},
        "peak_reserved_bytes": reserved,
        "process": {"low_bytes": reserved + non_torch.low_bytes, "high_bytes": reserved + non_torch.high_bytes},
        "host": host_memory(found.host_timeline).model_dump(mode="json"),
        "collectives": [asdict(each) | {"phase": phases[each.span]} for each in timeline.collectives],
        "operators": [asdict(each) | {"phase": phases[each.span]} for each in timeline.operators],
        "notices": list(found.notices),
        "versions": found.versions,
    }
