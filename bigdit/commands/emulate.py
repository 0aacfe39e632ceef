"""`bigdit emulate`: whether anybody's training script fits a card, by running it on one that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit.commands.options import Json

if TYPE_CHECKING:
    from bigdit.catalog import Gpu
    from bigdit.emulator.emulation import Emulation, Run


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="The script, as it is started.")],
    gpu: Annotated[str, typer.Option(help="A card of `bigdit gpus`, or a MIG slice (a100-80g-sxm:3g.40gb).")],
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What a CUDA process is told instead, as 46068MiB or 24GB.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", "--cards", min=1, help="Cards, one for each process of the command.")
    ] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="End each process after so many optimizer steps.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for report.html, report.json and snapshots for memory_viz.")
    ] = None,
    fake_weights: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[=CONFIG]", help="A hub's model to lay out empty, by its name and a config; repeatable."
        ),
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> int:
    """Run a training command, unmodified, on emulated cards, and show what it takes of them.

    Real CUDA PyTorch runs with no GPU: kernels are not executed, and all memory is accounted for. Ends with 2 where a
    process runs out of memory and does not go on, and else as the command does, but with 1 for a command's own 2. With
    --json what the command prints goes to stderr.
    """
    from bigdit.emulator.interpreter import check_machine

    check_machine()  # first, so that what is missing is said at once
    from bigdit import catalog, log
    from bigdit.emulator.launch import GPUS_MOST
    from bigdit.errors import UserError
    from bigdit.report.emulation import document, show

    card = catalog.resolve_gpu(gpu, gpu_memory)
    if processes > GPUS_MOST:
        raise UserError(f"--processes is {processes}, and one machine is emulated with 1 to {GPUS_MOST} cards")
    if out is not None:
        from bigdit.report.emulation import clear_folder

        clear_folder(out)
    found = _emulate(command, card, processes, steps, fake_weights, out, as_json)
    if out is not None:
        from bigdit.report.emulation import write_emulation

        for file in write_emulation(found, out):
            log.notice(f"wrote {file}")
    if as_json:
        log.emit_json(document(found))
    else:
        show(found)
    return found.exit_status


def _emulate(
    command: list[str],
    card: Gpu,
    cards: int,
    steps: int | None,
    fake_weights: list[str],
    out: Path | None,
    as_json: bool,
) -> Emulation:
    """Run the command, and where its loss is scaled once more with the first step skipped."""
    from bigdit import log
    from bigdit.emulator.emulation import Emulation
    from bigdit.emulator.launch import emulated_environment, shared_state
    from bigdit.emulator.run import run_emulated, workplace

    with workplace() as folder:
        environment = emulated_environment(card, cards)
        if fake_weights:
            from bigdit.emulator.fake_weights import lay_out

            environment |= lay_out(fake_weights, folder / "hub", environment)

        def once(skip_first: bool) -> Run:
            snapshots = out if not skip_first else None if out is None else out / "first-step-skipped"
            with shared_state() as state:
                return run_emulated(
                    command,
                    environment | emulated_environment(card, cards, state),
                    folder,
                    steps=steps,
                    skip_first=skip_first,
                    snapshots=snapshots,
                    stdout_to_stderr=as_json,
                )

        runs = [once(skip_first=False)]
        if runs[0].scales_loss and (runs[0].exit_status == 0 or runs[0].fits is False):
            log.notice("fp16 with loss scaling: once more, with the first step skipped as on real cards")
            runs.append(once(skip_first=True))
    return Emulation(command=tuple(command), gpu=card, gpus=cards, runs=tuple(runs))
