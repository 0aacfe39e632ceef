"""`bigdit gpus`: GPUs of the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigdit import log
from bigdit.errors import UserError
from bigdit.units import GIB, gib, parse_memory

if TYPE_CHECKING:
    from rich.table import Table

    from bigdit.catalog.gpus import Gpu


def run(
    containing: Annotated[
        str | None,
        typer.Option("--filter", metavar="TEXT", help="Only GPUs with TEXT in their name, alias or architecture."),
    ] = None,
    min_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Only GPUs with at least this total in nvidia-smi: 24GB.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with every field, source, alias and MIG slice.")
    ] = False,
) -> None:
    """List the GPUs that can be planned for, with their usable memory."""
    found = _found(containing, min_memory)
    if as_json:
        log.emit_json([_fields(gpu) for gpu in found])
    else:
        log.out.print(_table(found))


def _found(containing: str | None, min_memory: str | None) -> list[Gpu]:
    from bigdit.catalog.gpus import gpu_aliases, gpus, no_gpu

    asked, least = (containing or "").casefold(), 0 if min_memory is None else _least(min_memory)
    known = gpus()
    words = {g.name: " ".join((g.name, g.title, g.architecture, *gpu_aliases(g.name))).casefold() for g in known}
    named = [g for g in known if asked in words[g.name]]
    if not named:
        raise UserError(f"no GPU has {containing!r} in its name, alias or architecture{no_gpu(asked)}")
    found = [g for g in named if g.total_bytes >= least]
    if not found:
        largest = max(named, key=lambda g: g.total_bytes)
        which = "GPU" if containing is None else f"GPU with {containing!r} in its name"
        raise UserError(
            f"no {which} has {gib(least)} (--min-memory {min_memory}); the largest is the {largest.name}, "
            f"{gib(largest.total_bytes)}"
        )
    return found


def _least(min_memory: str) -> int:
    try:
        return parse_memory(min_memory)
    except UserError as error:
        raise UserError(*(f"--min-memory: {problem}" for problem in error.problems)) from None


def _fields(gpu: Gpu) -> dict[str, Any]:
    from bigdit.catalog.gpus import gpu_aliases, mig_profiles

    return gpu.model_dump(mode="json") | {
        "total_bytes": gpu.total_bytes,
        "usable_bytes": gpu.usable_bytes,
        "pcie_gbs": round(gpu.pcie_gbs, 2),
        "nvlink_one_way_gbs": gpu.nvlink_one_way_gbs,
        "host_gbs": round(gpu.host_gbs, 2),
        "aliases": gpu_aliases(gpu.name),
        "mig_profiles": mig_profiles(gpu),
    }


def _table(found: list[Gpu]) -> Table:
    from bigdit.report.tables import cell, table

    columns = ("GPU", "GiB", "smi MiB", "sm", "bf16", "fp16", "GB/s", "pcie", "nvlink")
    made = table("GPUs", columns, numeric=columns[1:])
    for gpu in found:
        major, minor = gpu.compute_capability
        made.add_row(
            gpu.name,
            f"{'' if gpu.usable_verified else '~'}{gpu.usable_bytes / GIB:.2f}",
            str(gpu.total_mib),
            f"{major}.{minor}",
            cell(gpu.tflops.bf16),
            cell(gpu.tflops.fp16),
            cell(gpu.bandwidth_gbs),
            f"{gpu.pcie_gbs:.0f}",
            cell(gpu.nvlink_one_way_gbs),
        )
    made.caption = (
        f"{len(found)} GPU{'' if len(found) == 1 else 's'}\n"
        "GiB: usable by CUDA processes (~ derived)\n"
        "smi MiB: total in nvidia-smi; sm: compute capability\n"
        "bf16, fp16: dense TFLOP/s; GB/s: memory bandwidth\n"
        "pcie, nvlink: peak GB/s one way\n"
        "sources, aliases and MIG slices (--gpu GPU:PROFILE): --json"
    )
    return made
