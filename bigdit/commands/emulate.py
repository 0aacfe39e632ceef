"""`bigdit emulate`: run any training script on an emulated GPU, and report whether it fits."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit import log
from bigdit.commands import Json
from bigdit.errors import UserError

if TYPE_CHECKING:
    from bigdit.catalog import Gpu
    from bigdit.emulator.emulation import EmulatedRun, Emulation


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="The command that starts the script.")],
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="A GPU of `bigdit gpus`, or a MIG slice: a100-80g-sxm:3g.40gb.")
    ],
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Usable memory, such as 46068MiB or 24GB. Default: that of `bigdit gpus`."),
    ] = None,
    processes: Annotated[
        int,
        typer.Option("--processes", "--gpus", min=1, metavar="N", help="GPUs, and so processes, per machine."),
    ] = 1,
    nodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of machines; the command starts once for each.")
    ] = 1,
    own_networks: Annotated[
        bool, typer.Option("--own-networks", help="Give each machine (node1, node2, …) its own network, offline.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop each process after this many optimizer steps.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write report.html, report.json and snapshots for memory_viz to DIR."),
    ] = None,
    fake_weights: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[=LIKE]",
            help="Imitate this hub repository with empty weights. LIKE: a folder with its configs, or a repository "
            "with the same. Repeatable.",
        ),
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> int:
    """Run a training command unchanged on emulated GPUs, and show the memory that it needs.

    The CUDA build of PyTorch runs without a GPU. Kernels are not executed; all memory is counted. With --json
    the command's output goes to stderr.

    Exit status: 0 if it fits; 2 if a process runs out of memory and stops. Another is no answer: the command's own
    status, or 1 if that is 0 or 2.
    """
    from bigdit.emulator.interpreter import check_machine

    check_machine()  # first: what is missing is an error at once
    from bigdit import catalog
    from bigdit.emulator.launch import GPUS_MOST
    from bigdit.report.emulation import document, show

    device = catalog.resolve_gpu(gpu, gpu_memory)
    if processes > GPUS_MOST:
        raise UserError(f"--processes is {processes}, and an emulated machine has 1 to {GPUS_MOST} GPUs")
    if out is not None:
        from bigdit.report.emulation import clear_folder

        clear_folder(out)
    found = _emulate(command, device, processes, nodes, steps, fake_weights, out, as_json, own_networks)
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
    device: Gpu,
    gpus: int,
    nodes: int,
    steps: int | None,
    fake_weights: list[str],
    out: Path | None,
    as_json: bool,
    own_networks: bool,
) -> Emulation:
    """Run the command; if it scales its loss, run it again with the first step skipped."""
    from bigdit.emulator.emulation import Emulation
    from bigdit.emulator.launch import emulated_environment, shared_state
    from bigdit.emulator.run import run_emulated, workplace
    from bigdit.report.emulation import FIRST_SKIPPED

    with workplace() as folder:
        environment = emulated_environment(device, gpus) | {"PET_NPROC_PER_NODE": str(gpus)}  # torchrun's default: 1
        if fake_weights:
            from bigdit.emulator.fake_weights import lay_out

            environment |= lay_out(fake_weights, folder / "hub", environment)

        def once(skip_first: bool) -> EmulatedRun:
            snapshots = out if not skip_first else None if out is None else out / FIRST_SKIPPED
            with ExitStack() as stack:
                states = [stack.enter_context(shared_state()) for _ in range(nodes)]
                return run_emulated(
                    command,
                    [environment | emulated_environment(device, gpus, state) for state in states],
                    folder,
                    steps=steps,
                    skip_first=skip_first,
                    snapshots=snapshots,
                    stdout_to_stderr=as_json,
                    own_networks=own_networks,
                )

        runs = [once(skip_first=False)]
        if runs[0].scales_loss and (runs[0].exit_status == 0 or runs[0].fits is False):
            log.notice("fp16 with loss scaling: running again with the first step skipped, as on real GPUs")
            runs.append(once(skip_first=True))
    return Emulation(command=tuple(command), gpu=device, gpus=gpus, nodes=nodes, runs=tuple(runs))
