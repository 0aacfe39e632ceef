"""The folder of an emulation: a page of HTML that needs nothing beside it, and the same as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from bigdit.emulator.account import Account, CardAccount, OutOfMemory
from bigdit.emulator.emulation import Emulation, Run
from bigdit.files import check_writable, write_json, write_text
from bigdit.memory import CATEGORIES
from bigdit.report import emulation as text
from bigdit.report.render import render
from bigdit.report.svg import DARK, inline, variable
from bigdit.report.timeline import BEHIND, COLOURS
from bigdit.units import GIB, duration, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE, JSON = "report.html", "report.json"

MOST_CURVES = 4
"""Processes whose curves are drawn: the highest; others have their row in the table and all in the JSON."""

MOST_SPANS = 60
"""Phases that can be told apart in a picture; where there are more, only the start is marked."""

SHADES = {"backward": COLOURS["saved activation"], "step": COLOURS["optimizer state"]}


def clear_folder(folder: Path) -> None:
    """Take away what an earlier emulation left in the folder. Raises UserError where it could not be written, before
    anything runs for its sake."""
    check_writable("--out", folder)
    if (folder / JSON).exists():
        for file in (folder / PAGE, folder / JSON, *folder.rglob("snapshot-*.pickle")):
            file.unlink(missing_ok=True)


def write_emulation(emulation: Emulation, folder: Path) -> list[Path]:
    """Write the page and the JSON beside the snapshots, and name all. Raises UserError where it cannot be written."""
    write_text(folder / PAGE, page(emulation))
    write_json(folder / JSON, text.document(emulation))
    return [folder / PAGE, folder / JSON, *sorted(folder.rglob("snapshot-*.pickle"))]


def page(emulation: Emulation) -> str:
    """The whole page. Everything that processes wrote is escaped: it is somebody's script."""
    filters = {"gib": gib, "between": text.between, "duration": duration, "place": text.place}
    shown = {
        "emulation": emulation,
        "text": text,
        "usable": emulation.gpu.usable_bytes,
        "colours": {variable(category): (COLOURS[category], DARK[category]) for category in CATEGORIES},
        "runs": [_run(run, at, emulation) for at, run in enumerate(emulation.runs)],
    }
    return render("emulation.html", filters, shown)


def _run(run: Run, at: int, emulation: Emulation) -> dict[str, Any]:
    """All that the template shows of a run."""
    found = [(account, card) for account in run.accounts for card in account.cards]
    found.sort(key=lambda each: (run.holds(each[0]), -each[1].peak_reserved_bytes))
    word, why = text.verdict(run, emulation)
    return {
        "run": run,
        "word": word,
        "why": why.lstrip(":, "),
        "class": {"fits": "fits", "does not fit": "no"}.get(word, "tight"),
        "name": "first step skipped by the loss scaler" if run.first_step_skipped else "as it is",
        "highest": run.highest,
        "figures": [
            (account, card, _inline(account, card, run.shortage(account), emulation, f"curve-{at}-{number}"))
            for number, (account, card) in enumerate(found[:MOST_CURVES])
            if card.curve
        ],
        "left_out": max(0, len(found) - MOST_CURVES),
    }


def _inline(
    account: Account, card: CardAccount, shortage: OutOfMemory | None, emulation: Emulation, name: str
) -> Markup:
    said = (
        f"Memory of {account.title} in the order of the allocator's events: allocated up to "
        f"{gib(card.peak_allocated_bytes)}, in {card.peak_phase}, and reserved up to {gib(card.peak_reserved_bytes)}, "
        f"of the card's {gib(emulation.gpu.usable_bytes)}."
    )
    return inline(curve_figure(account, card, shortage, emulation), name, "Memory over the run", said)


def curve_figure(account: Account, card: CardAccount, shortage: OutOfMemory | None, emulation: Emulation) -> Figure:
    """Allocated and reserved over the run in GiB, phases behind them, and what the card leaves to torch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    at, allocated, reserved = (list(column) for column in zip(*card.curve, strict=True))
    _draw_phases(axes, card)
    blue, red = COLOURS["parameter"], COLOURS["gradient"]
    heights = [nbytes / GIB for nbytes in allocated]
    axes.fill_between(at, heights, step="post", color=blue, alpha=0.25, linewidth=0)
    axes.plot(at, heights, drawstyle="steps-post", color=blue, linewidth=1.2, label="allocated")
    axes.plot(
        at, [nbytes / GIB for nbytes in reserved], drawstyle="steps-post", color=red, linewidth=1.2, label="reserved"
    )
    _draw_card(axes, account, card, emulation)
    if shortage is not None and shortage.card == card.index:
        _draw_oom(axes, shortage, at[-1])
    axes.set_xlim(0, max(card.events, 1))
    axes.set_xlabel("allocations and frees, in order")
    axes.set_ylabel("GiB")
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(alignment="left", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _draw_phases(axes: Axes, card: CardAccount) -> None:
    """Backward and step as stripes, where there are few enough; where the start ends in any case."""
    spans = card.spans
    ends = [*(span.start for span in spans[1:]), card.events][: len(spans)]
    if len(spans) <= MOST_SPANS:
        named = set[str]()
        for span, end in zip(spans, ends, strict=True):
            if span.phase in SHADES and end > span.start:
                label = None if span.phase in named else span.phase
                named.add(span.phase)
                axes.axvspan(span.start, end, color=SHADES[span.phase], alpha=0.3, linewidth=0, label=label)
    first = next((span.start for span in spans if span.phase != "start"), None)
    if first:
        axes.axvline(first, color="black", linewidth=0.8, linestyle=":")
        axes.annotate("first step", (first, 1), xycoords=axes.get_xaxis_transform(), xytext=(4, -4),
                      textcoords="offset points", va="top", bbox=BEHIND)  # fmt: skip


def _draw_card(axes: Axes, account: Account, card: CardAccount, emulation: Emulation) -> None:
    """The card's line, and below it what CUDA and NCCL may take beside torch; words where both are far above."""
    usable = emulation.gpu.usable_bytes
    beside = emulation.beside(account)
    top = max(card.peak_reserved_bytes, 1)
    words = f"usable {gib(usable)}, less CUDA and NCCL"
    if usable > 2 * top:
        axes.text(0.995, 0.985, f"{words}: above", transform=axes.transAxes, va="top", ha="right", bbox=BEHIND)
        axes.set_ylim(0, 1.2 * top / GIB)
        return
    axes.axhline(usable / GIB, color="black", linestyle="--", linewidth=1.2)
    axes.axhspan((usable - beside.high_bytes) / GIB, usable / GIB, color=COLOURS["temporary"], alpha=0.6, linewidth=0)
    axes.annotate(words, (0, usable / GIB), xycoords=axes.get_yaxis_transform(), xytext=(6, 5),
                  textcoords="offset points", bbox=BEHIND)  # fmt: skip
    axes.set_ylim(0, 1.15 * max(usable, top) / GIB)


def _draw_oom(axes: Axes, oom: OutOfMemory, end: int) -> None:
    """Where the process ran out of memory for good: at the end of its curve."""
    height = (oom.allocated_bytes + oom.asked_bytes) / GIB
    highest = axes.get_ylim()[1]
    axes.annotate(
        f"out of memory: {gib(oom.asked_bytes)} more asked",
        (end, min(height, highest)),
        xytext=(-10, -22),
        textcoords="offset points",
        ha="right",
        fontweight="bold",
        bbox=BEHIND,
    )
