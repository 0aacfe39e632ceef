"""A plan as tables: each phase, what is live at the peak, and what the card leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from bigdit.memory import Ledger
from bigdit.report.tables import DASH, table
from bigdit.units import gib


def phases(ledgers: Mapping[int, Ledger]) -> Table:
    """Peak of each phase by micro-batch size; the deciding one is marked."""
    rows = table("peak allocated, by phase", ["phase", *_heads(ledgers)], numeric=_heads(ledgers))
    for phase in _union([p.phase for p in ledger.phases] for ledger in ledgers.values()):
        cells = []
        for ledger in ledgers.values():
            mark = "◂ " if ledger.deciding.phase == phase else ""
            cells.append(mark + gib(ledger.phase(phase).peak_bytes))
        rows.add_row(phase, *cells)
    rows.caption = "◂ decides; phases are not summed"
    return rows


def at_peak(ledgers: Mapping[int, Ledger]) -> Table:
    """What is live at the peak, by category; the parts sum to the total."""
    rows = table("live at the peak, by category", ["category", *_heads(ledgers)], numeric=_heads(ledgers))
    for category in _union(ledger.at_peak for ledger in ledgers.values()):
        parts = [ledger.at_peak.get(category) for ledger in ledgers.values()]  # type: ignore[call-overload]
        rows.add_row(category, *(gib(part) if part else DASH for part in parts))
    rows.add_section()
    rows.add_row("total", *(gib(ledger.peak_allocated_bytes) for ledger in ledgers.values()))
    return rows


def _heads(ledgers: Mapping[int, Ledger]) -> list[str]:
    return [f"micro-batch {size}" for size in ledgers]


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    """All names, in the order in which they first come."""
    return list(dict.fromkeys(name for names in lists for name in names))
