"""`bigdit gpus`: the cards of the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from bigdit.catalog.gpus import Gpu


def run(
    containing: Annotated[
        str | None,
        typer.Option("--filter", metavar="TEXT", help="Only cards whose name, alias or architecture has TEXT."),
    ] = None,
    min_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Only cards whose total in nvidia-smi is at least SIZE: 24GB.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with every field, source, alias and MIG slice.")
    ] = False,
) -> None:
    """List the cards that can be planned for, with the memory that their drivers really give."""
    from bigdit import log

    found = _found(containing, min_memory)
    if as_json:
        log.emit_json([_fields(card) for card in found])
    else:
        log.out.print(_table(found))


def _found(containing: str | None, min_memory: str | None) -> list[Gpu]:
    from bigdit.catalog.gpus import gpu_aliases, gpus, no_gpu
    from bigdit.errors import UserError
    from bigdit.units import gib

    wanted, least = (containing or "").casefold(), 0 if min_memory is None else _least(min_memory)
    cards = gpus()
    words = {g.name: " ".join((g.name, g.title, g.architecture, *gpu_aliases(g.name))).casefold() for g in cards}
    named = [g for g in cards if wanted in words[g.name]]
    if not named:
        raise UserError(f"no card has {containing!r} in its name, alias or architecture{no_gpu(wanted)}")
    found = [g for g in named if g.total_bytes >= least]
    if not found:
        largest = max(named, key=lambda g: g.total_bytes)
        which = "card" if containing is None else f"card with {containing!r} in its name"
        raise UserError(
            f"no {which} has {gib(least)} (--min-memory {min_memory}); the largest is the {largest.name}, "
            f"{gib(largest.total_bytes)}"
        )
    return found


def _least(min_memory: str) -> int:
    from bigdit.errors import UserError
    from bigdit.units import parse_memory

    try:
        return parse_memory(min_memory)
    except UserError as error:
        raise UserError(*(f"--min-memory: {problem}" for problem in error.problems)) from None


def _fields(card: Gpu) -> dict[str, Any]:
    from bigdit.catalog.gpus import gpu_aliases, mig_profiles

    return card.model_dump(mode="json") | {
        "total_bytes": card.total_bytes,
        "usable_bytes": card.usable_bytes,
        "pcie_gbs": round(card.pcie_gbs, 2),
        "nvlink_one_way_gbs": card.nvlink_one_way_gbs,
        "host_gbs": round(card.host_gbs, 2),
        "aliases": gpu_aliases(card.name),
        "mig_profiles": mig_profiles(card),
    }


def _table(found: list[Gpu]) -> Table:
    from bigdit.report.tables import cell, table
    from bigdit.units import GIB

    columns = ("card", "GiB", "smi MiB", "sm", "bf16", "fp16", "GB/s", "pcie", "nvlink")
    made = table("Cards", columns, numeric=columns[1:])
    for card in found:
        major, minor = card.compute_capability
        made.add_row(
            card.name,
            f"{'' if card.usable_verified else '~'}{card.usable_bytes / GIB:.2f}",
            str(card.total_mib),
            f"{major}.{minor}",
            cell(card.tflops.bf16),
            cell(card.tflops.fp16),
            cell(card.bandwidth_gbs),
            f"{card.pcie_gbs:.0f}",
            cell(card.nvlink_one_way_gbs),
        )
    made.caption = (
        f"{len(found)} card{'' if len(found) == 1 else 's'}\n"
        "GiB: what a CUDA process is told (~ derived)\n"
        "smi MiB: the total of nvidia-smi; sm: compute capability\n"
        "bf16, fp16: dense TFLOP/s; GB/s: of the memory\n"
        "pcie, nvlink: peak GB/s one way\n"
        "sources, aliases and MIG slices (--gpu CARD:PROFILE): --json"
    )
    return made
