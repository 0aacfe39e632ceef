"""A ledger and what it takes of a card as tables: phases, what is live at the peak, and the way to nvidia-smi."""

from __future__ import annotations

from rich.table import Table

from bigdit.memory import Ledger
from bigdit.memory.allocator import Replay
from bigdit.memory.footprint import Footprint
from bigdit.memory.process import ByteRange
from bigdit.report.tables import DASH, table
from bigdit.units import gib


def phases(ledger: Ledger, replayed: Replay | None = None) -> Table:
    """Each phase's peak and what it leaves; with a replay that fits, what was reserved. The deciding one is marked."""
    if replayed is not None and not replayed.fits:
        replayed = None
    columns = ["peak allocated", "left at its end", *(["peak reserved"] if replayed else [])]
    rows = table("by phase", ["phase", *columns], numeric=columns)
    reserved = {phase.phase: phase.peak_reserved_bytes for phase in replayed.phases} if replayed else {}
    for phase in ledger.phases:
        mark = "◂ " if phase is ledger.deciding else ""
        cells = [mark + gib(phase.peak_bytes), gib(phase.end_bytes)]
        if replayed:
            cells.append(gib(reserved[phase.phase]))
        rows.add_row(phase.phase, *cells)
    rows.caption = "◂ decides; phases are not summed"
    return rows


def at_peak(ledger: Ledger) -> Table:
    """What is live at the peak, by category, with its share; the parts sum to the total."""
    rows = table(f"live at the peak, in {ledger.deciding.phase}", ["category", "bytes", "share"], ["bytes", "share"])
    total = ledger.peak_allocated_bytes
    for category, nbytes in ledger.at_peak.items():
        rows.add_row(category, gib(nbytes), _share(nbytes, total))
    rows.add_section()
    rows.add_row("total", gib(total), _share(total, total))
    return rows


def reserved(footprint: Footprint) -> Table:
    """The allocator in its two ways, each on the card: what it reserves, what of that lies idle, how it ends."""
    numeric = ["allocated", "reserved", "idle", "flushes"]
    rows = table("reserved by the caching allocator", ["segments", *numeric, "on the card"], numeric)
    for name, way in (("whole (default)", footprint.segments), ("expandable", footprint.expandable_segments)):
        run = way.on_card
        rows.add_row(
            name,
            gib(run.peak_allocated_bytes),
            gib(run.peak_reserved_bytes),
            f"{100 * run.fragmentation:.1f} %",
            str(run.cache_flushes),
            "fits" if run.fits else "out of memory",
        )
    rows.caption = "expandable: PYTORCH_ALLOC_CONF=expandable_segments:True; a flush waits for the card"
    return rows


def failures(footprint: Footprint) -> list[str]:
    """One line for each of the allocator's ways that ran out of memory: where, and by how much."""
    lines = []
    for name, way in (("whole", footprint.segments), ("expandable", footprint.expandable_segments)):
        failure = way.on_card.failure
        if failure is not None:
            lines.append(
                f"{name} segments run out in {failure.phase}: {gib(failure.asked_bytes)} for a {failure.category} of "
                f"{failure.label}, {gib(failure.free_bytes)} free; {gib(way.wanted_bytes)} would be reserved"
            )
    return lines


def process(footprint: Footprint) -> Table:
    """From what torch reserves to what nvidia-smi shows, and what the card leaves."""
    rows = table("on the card", ["", "low", "high"], numeric=["low", "high"])
    shown, beside = footprint.process, footprint.beside
    held = ByteRange(low_bytes=shown.low_bytes - beside.low_bytes, high_bytes=shown.high_bytes - beside.high_bytes)
    rows.add_row("reserved by torch", *_both(held))
    rows.add_row("CUDA context and NCCL", *_both(beside))
    rows.add_section()
    rows.add_row("process, as nvidia-smi shows it", *_both(shown))
    rows.add_row("usable bytes of the card", gib(footprint.usable_bytes), gib(footprint.usable_bytes))
    left = [footprint.usable_bytes - nbytes for nbytes in (shown.low_bytes, shown.high_bytes)]
    rows.add_row("left", *map(gib, left))
    return rows


def _both(found: ByteRange) -> tuple[str, str]:
    return gib(found.low_bytes), gib(found.high_bytes)


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else DASH
