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
        typer.Option("--filter", metavar="TEXT", help="Only cards whose name or architecture has TEXT."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with every field and source.")] = False,
) -> None:
    """List the cards that can be planned for, with the memory that their drivers really give."""
    from bigdit import log
    from bigdit.catalog.gpus import gpus
    from bigdit.errors import UserError, nearest

    wanted = (containing or "").casefold()
    cards = gpus()
    found = [g for g in cards if wanted in f"{g.name} {g.title} {g.architecture}".casefold()]
    if not found:
        near = nearest(wanted, [g.name for g in cards])
        raise UserError(f"no card has {containing!r} in its name or architecture; {near}")
    if as_json:
        log.emit_json([_fields(card) for card in found])
    else:
        log.out.print(_table(found))


def _fields(card: Gpu) -> dict[str, Any]:
    bytes_ = {"total_bytes": card.total_bytes, "usable_bytes": card.usable_bytes}
    return card.model_dump(mode="json") | bytes_


def _table(found: list[Gpu]) -> Table:
    from bigdit.report.tables import cell, table
    from bigdit.units import gib

    columns = ("card", "usable", "smi MiB", "sm", "bf16", "fp16", "GB/s", "nvlink")
    made = table("Cards", columns, numeric=columns[1:])
    for card in found:
        major, minor = card.compute_capability
        made.add_row(
            card.name,
            ("" if card.usable_verified else "~") + gib(card.usable_bytes),
            str(card.total_mib),
            f"{major}.{minor}",
            cell(card.tflops.bf16),
            cell(card.tflops.fp16),
            cell(card.bandwidth_gbs),
            cell(card.nvlink_gbs),
        )
    made.caption = (
        "usable: what a CUDA process is told (~ derived)\n"
        "smi MiB: the total of nvidia-smi; sm: compute capability\n"
        "bf16, fp16: dense TFLOP/s; the sources: --json"
    )
    return made
