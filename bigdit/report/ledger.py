"""A ledger as tables: phases, what is allocated at the peak, and what the process takes of the GPU."""

from __future__ import annotations

from rich.table import Table

from bigdit.memory import Ledger
from bigdit.memory.process import ByteRange
from bigdit.report.tables import DASH, table
from bigdit.units import gib


def phases(ledger: Ledger) -> Table:
    """Each phase's peak, and what it leaves allocated; the highest peak is marked."""
    columns = ["peak allocated", "left at its end"]
    rows = table("by phase", ["phase", *columns], numeric=columns)
    for phase in ledger.phases:
        mark = "◂ " if phase is ledger.deciding else ""
        rows.add_row(phase.phase, mark + gib(phase.peak_bytes), gib(phase.end_bytes))
    rows.caption = "◂ peak phase; phases are not summed"
    return rows


def at_peak(ledger: Ledger) -> Table:
    """What is allocated at the peak, by category, with its share; the parts sum to the total."""
    title = f"allocated at the peak, in {ledger.deciding.phase}"
    rows = table(title, ["category", "bytes", "share"], ["bytes", "share"])
    total = ledger.peak_allocated_bytes
    for category, nbytes in ledger.at_peak.items():
        rows.add_row(category, gib(nbytes), _share(nbytes, total))
    rows.add_section()
    rows.add_row("total", gib(total), _share(total, total))
    return rows


def process(reserved_bytes: int, non_torch: ByteRange, usable_bytes: int) -> Table:
    """From what torch reserves to what nvidia-smi shows, and what the GPU has left."""
    rows = table("on the GPU", ["", "low", "high"], numeric=["low", "high"])
    parts = non_torch.low_bytes, non_torch.high_bytes
    shown = [reserved_bytes + part for part in parts]
    rows.add_row("reserved by torch", gib(reserved_bytes), gib(reserved_bytes))
    rows.add_row("CUDA context and NCCL", *map(gib, parts))
    rows.add_section()
    rows.add_row("process, as nvidia-smi shows it", *map(gib, shown))
    rows.add_row("usable bytes of the GPU", gib(usable_bytes), gib(usable_bytes))
    rows.add_row("left", *(gib(usable_bytes - nbytes) for nbytes in shown))
    return rows


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else DASH
