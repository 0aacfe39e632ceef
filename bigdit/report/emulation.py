"""The GPU memory that an emulated script needed: in the terminal, as JSON, and as a self-contained page."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from rich.markup import escape
from rich.table import Table

from bigdit import log
from bigdit.emulator.emulation import (
    Account,
    CodeLine,
    EmulatedOom,
    EmulatedRun,
    Emulation,
    GpuAccount,
    TensorGroup,
    times,
)
from bigdit.files import check_ours, check_writable, write_json, write_text
from bigdit.memory.process import ByteRange
from bigdit.report.figures import BEHIND, COLOURS, canvas, draw_usable
from bigdit.report.html import inline, render
from bigdit.report.tables import DASH, table
from bigdit.report.words import gibs
from bigdit.units import GIB, duration, gib, how_many

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LINES = 8
"""Groups of tensors in the terminal; the page and JSON have all."""

WORK = {
    "launches": "kernels launched, without those of cuBLAS and cuDNN",
    "library_calls": "calls of cuBLAS and cuDNN",
    "copies_to_device": "copies to the GPU",
    "copies_to_host": "copies to CPU memory",
    "copies_on_device": "copies on the GPU",
    "host_syncs": "times that the CPU waits for the GPU",
}


def show(emulation: Emulation) -> None:
    """Print the report, no wider than the terminal."""
    _say(f"[bold]{escape(title(emulation))}[/bold]")
    _say(escape(subtitle(emulation)))
    for run in emulation.runs:
        _show_run(run, emulation)
    log.out.print()
    for text in emulation.notices:
        _say(f"note: {escape(text)}")
    for run in emulation.runs:
        word, why = verdict(run, emulation)
        of = _which(run) if len(emulation.runs) > 1 else ""
        _say(f"{of}[bold]{word}[/bold]{escape(why)}")


def document(emulation: Emulation) -> dict[str, Any]:
    """The emulation as JSON, with verdicts. If `fits` is null, `reason` has the cause."""
    found = emulation.model_dump(mode="json")
    for run, dumped in zip(emulation.runs, found["runs"], strict=True):
        dumped |= _answer(run, emulation)
        for account, each in zip(run.accounts, dumped["accounts"], strict=True):
            each |= {"fits": run.holds(account) and (run.exit_status == 0 or None), "work_a_step": work(account)}
            for gpu, shown in zip(account.gpus, each["gpus"], strict=True):
                shown["process"] = emulation.process(account, gpu).model_dump(mode="json")
    return {
        "grade": "emulated",
        **_answer(emulation.decisive, emulation),
        "exit_status": emulation.exit_status,
        **found,
        "notices": emulation.notices,
    }


def _answer(run: EmulatedRun, emulation: Emulation) -> dict[str, Any]:
    word, why = verdict(run, emulation)
    return {"fits": run.fits, "verdict": word, "reason": why.lstrip(":, ")}


def title(emulation: Emulation) -> str:
    gpus = f"{emulation.gpus} × " if emulation.gpus > 1 else ""
    gpus = f"{emulation.nodes} × {emulation.gpus} × " if emulation.nodes > 1 else gpus
    return f"{shlex.join(emulation.command)} on {gpus}{emulation.gpu.title}"


def subtitle(emulation: Emulation) -> str:
    run = emulation.runs[0]
    versions = run.accounts[0].versions if run.accounts else {}
    torch = f"torch {versions['torch']}, " if "torch" in versions else ""
    steps = max((account.steps for account in run.accounts), default=0)
    return f"emulated, kernels not run: {torch}{steps} step{'' if steps == 1 else 's'} in {duration(run.seconds)}"


def verdict(run: EmulatedRun, emulation: Emulation) -> tuple[str, str]:
    """The verdict, and why."""
    highest = run.highest
    if highest is None:
        return "no answer", f": {ending(run)}"
    account, gpu = highest
    if run.fits is False:
        return "does not fit", f": {account.title} ran out of memory{_asked(run.shortage(account))}"
    taken = emulation.process(account, gpu)
    usable = emulation.gpu.usable_bytes
    many = len(run.accounts) > 1
    needed = f"{account.title if many else 'the process'} needs {between(taken)} of {gib(usable)}"
    if run.exit_status:
        return "no answer", f": {ending(run)}; until then it needed {between(taken)} of {gib(usable)}"
    if run.out_of_memory_count:
        return "ended well", f", although memory ran out {times(run.out_of_memory_count)}: {needed}"
    if taken.high_bytes > usable:
        needed += ", but with the largest CUDA context and NCCL buffers it is too much"
    return "fits", f": {needed}"


def _asked(oom: EmulatedOom | None) -> str:
    return "" if oom is None else f" in {oom.phase}: {gib(oom.asked_bytes)} requested, {gib(oom.free_bytes)} free"


def ending(run: EmulatedRun) -> str:
    if run.exit_status == 0:
        return "the command ended well"
    if run.exit_status > 128:
        return f"the command was ended by signal {run.exit_status - 128}"
    return f"the command ended with status {run.exit_status}"


def between(found: ByteRange) -> str:
    return gibs(found.low_bytes, found.high_bytes)


def work(account: Account) -> dict[str, int]:
    """Kernels, copies and waits of a step: medians over all steps but the first, which also sets up libraries."""
    steps = account.work_by_step[1:] or account.work_by_step
    names = [name for name in WORK if any(name in step for step in steps)]
    return {name: int(statistics.median(step.get(name, 0) for step in steps)) for name in names}


def place(line: CodeLine | None) -> str:
    """`train.py:41`, relative to the working folder; for a library relative to its package."""
    if line is None:
        return DASH
    return f"{shown_path(line.file)}:{line.line}"


def shown_path(file: str) -> str:
    for installed in ("site-packages/", "dist-packages/"):
        if installed in file:
            parts = file.rpartition(installed)[2].split("/")
            return "/".join(parts if len(parts) < 4 else (parts[0], "…", parts[-1]))
    relative, parts = os.path.relpath(file), file.split(os.sep)
    if not relative.startswith(".."):
        return relative
    return file if len(parts) < 5 else os.path.join("…", *parts[-2:])


def _show_run(run: EmulatedRun, emulation: Emulation) -> None:
    if run.accounts or len(emulation.runs) > 1:
        log.out.print()
    if len(emulation.runs) > 1:
        _say(f"[bold]{_which(run)}[/bold]")
    if run.accounts:
        log.out.print(processes(run, emulation))
        _say("process: with CUDA context and NCCL, as in nvidia-smi")
    highest = run.highest
    if highest is None:
        return
    account, gpu = highest
    shortage = run.shortage(account)
    if shortage is not None:
        log.out.print()
        _show_oom(account, shortage)
    log.out.print()
    log.out.print(phases(gpu))
    _say(f"of {account.title}; start: all before the first forward pass of training; forward: the rest of a step")
    if run.holds(account):
        log.out.print()
        log.out.print(tensors_of(gpu.tensors, f"largest tensors at the peak, in {gpu.peak_phase}"))
    counts = work(account)
    if any(counts.values()):
        rows = table("work a step", ["", "count"], ["count"])
        for name, count in counts.items():
            rows.add_row(WORK[name], f"{count:,}")
        log.out.print()
        log.out.print(rows)


def processes(run: EmulatedRun, emulation: Emulation) -> Table:
    """The peaks of each process by torch's allocator and in nvidia-smi."""
    numeric = ["GPU", "allocated", "reserved", "process", "steps"]
    rows = table("peaks by process", ["process", *numeric, ""], numeric)
    for account in run.accounts:
        for gpu in account.gpus:
            rows.add_row(
                account.title,
                number(account, gpu, emulation),
                gib(gpu.peak_allocated_bytes),
                gib(gpu.peak_reserved_bytes),
                between(emulation.process(account, gpu)),
                steps(account),
                escape(end(account, run)),
            )
    return rows


def number(account: Account, gpu: GpuAccount, emulation: Emulation) -> str:
    """A GPU's number in its machine; with several machines `0 of machine 2`."""
    return f"{gpu.index} of machine {account.node + 1}" if emulation.nodes > 1 else str(gpu.index)


def phases(gpu: GpuAccount) -> Table:
    """The peaks of a process by phase."""
    numeric = ["allocated", "reserved"]
    rows = table("peaks by phase", ["phase", *numeric], numeric)
    for phase in gpu.phases:
        mark = "◂ " if phase.phase == gpu.peak_phase else ""
        rows.add_row(phase.phase, mark + gib(phase.peak_allocated_bytes), gib(phase.peak_reserved_bytes))
    return rows


def tensors_of(groups: tuple[TensorGroup, ...], heading: str, most: int = LINES) -> Table:
    """Tensors by the lines that made them."""
    rows = table(heading, ["bytes", "count", "made in", "by"], ["bytes", "count"])
    for group in groups[:most]:
        rows.add_row(gib(group.nbytes), str(group.count), group.phase or DASH, "\n".join(map(escape, made_by(group))))
    rest = groups[most:]
    if rest:
        rows.add_row(gib(sum(each.nbytes for each in rest)), str(sum(each.count for each in rest)), DASH, "all others")
    return rows


def made_by(group: TensorGroup) -> Iterator[str]:
    """The script's line and its code, then the library's."""
    if group.phase is None:
        yield "all others"
    elif group.script is not None:
        yield f"{place(group.script)} {group.script.code}"
    elif group.library is None:
        yield "made within torch, by no line of Python"
    if group.library is not None:
        yield f"  {place(group.library)} {group.library.name}"


def _show_oom(account: Account, oom: EmulatedOom) -> None:
    when = f"in {oom.phase}, after {how_many(oom.steps, 'step')}, on GPU {oom.gpu}"
    _say(f"[bold]{account.title} ran out of memory[/bold] {when}:")
    _say(f"  {gib(oom.asked_bytes)} requested, {gib(oom.free_bytes)} free of {gib(oom.total_bytes)}; "
         f"{gib(oom.allocated_bytes)} allocated")  # fmt: skip
    for line in own_lines(oom):
        _say(escape(f"  {place(line)} in {line.name}: {line.code}"))
    log.out.print()
    log.out.print(tensors_of(oom.tensors, "allocated when memory ran out"))


def own_lines(oom: EmulatedOom) -> list[CodeLine]:
    """The script's own lines of the traceback, outermost first, then the innermost of a library."""
    own = [line for line in oom.frames if line.own]
    within = [line for line in oom.frames[:1] if not line.own]
    return [*reversed(own), *within]


def _which(run: EmulatedRun) -> str:
    return "first step skipped by the loss scaler: " if run.first_step_skipped else "as it is, first step taken: "


def steps(account: Account) -> str:
    return f"{account.steps}" + (f" ({account.skipped_steps} skipped)" if account.skipped_steps else "")


def end(account: Account, run: EmulatedRun) -> str:
    if not run.holds(account):
        return "out of memory"
    if account.error is not None:
        return account.error.type
    return {"signal": "ended by a signal", "steps": "", "exit": "", "exception": "", "exec": "started another program"}[
        account.ended
    ]


def _say(line: str) -> None:
    log.out.print(line, highlight=False)


PAGE, JSON, FIRST_SKIPPED = "report.html", "report.json", "first-step-skipped"

MOST_CURVES = 4
"""Processes with a curve on the page: the highest; the table and the JSON have all."""

MOST_SPANS = 60
"""Phases that a figure can show; with more of them only the start is marked."""

SHADES = {"backward": COLOURS["saved activation"], "step": COLOURS["optimizer state"]}


def clear_folder(folder: Path) -> None:
    """Remove the files of an earlier emulation from the folder. Raises UserError if it holds others, or cannot be
    written."""
    found = check_ours(folder, "emulation", JSON, (PAGE, JSON, "snapshot-*.pickle", FIRST_SKIPPED))
    check_writable("--out", folder)
    if found:
        for file in (folder / PAGE, folder / JSON, *folder.rglob("snapshot-*.pickle")):
            file.unlink(missing_ok=True)


def write_emulation(emulation: Emulation, folder: Path) -> list[Path]:
    """Write page and JSON next to the snapshots, and return all paths. Raises UserError if that fails."""
    write_text(folder / PAGE, page(emulation))
    write_json(folder / JSON, document(emulation))
    return [folder / PAGE, folder / JSON, *sorted(folder.rglob("snapshot-*.pickle"))]


def page(emulation: Emulation) -> str:
    """The whole page. Everything that processes wrote is escaped, because the script is not ours."""
    filters = {"gib": gib, "between": between, "duration": duration, "place": place}
    used = (title, subtitle, number, steps, end, own_lines, work)
    shown = {
        "emulation": emulation,
        "text": {each.__name__: each for each in used} | {"WORK": WORK},
        "usable": emulation.gpu.usable_bytes,
        "runs": [_run(run, at, emulation) for at, run in enumerate(emulation.runs)],
    }
    return render("emulation.html", filters, shown)


def _run(run: EmulatedRun, at: int, emulation: Emulation) -> dict[str, Any]:
    """The template's values for a run."""
    found = [(account, gpu) for account in run.accounts for gpu in account.gpus]
    found.sort(key=lambda each: (run.holds(each[0]), -each[1].peak_reserved_bytes))
    word, why = verdict(run, emulation)
    return {
        "run": run,
        "word": word,
        "why": why.lstrip(":, "),
        "class": {"fits": "fits", "does not fit": "no"}.get(word, "tight"),
        "name": "first step skipped by the loss scaler" if run.first_step_skipped else "as it is",
        "highest": run.highest,
        "figures": [
            (account, gpu, _inline(account, gpu, run.shortage(account), emulation, f"curve-{at}-{number}"))
            for number, (account, gpu) in enumerate(found[:MOST_CURVES])
            if gpu.curve
        ],
        "left_out": max(0, len(found) - MOST_CURVES),
    }


def _inline(account: Account, gpu: GpuAccount, shortage: EmulatedOom | None, emulation: Emulation, name: str) -> Markup:
    description = (
        f"Memory of {account.title} in the order of the allocator's events: allocated up to "
        f"{gib(gpu.peak_allocated_bytes)}, in {gpu.peak_phase}, and reserved up to {gib(gpu.peak_reserved_bytes)}, "
        f"of the GPU's {gib(emulation.gpu.usable_bytes)}."
    )
    return inline(curve_figure(account, gpu, shortage, emulation), name, "Memory over the run", description)


def curve_figure(account: Account, gpu: GpuAccount, shortage: EmulatedOom | None, emulation: Emulation) -> Figure:
    """Allocated and reserved GiB over the run, its phases, and the memory that the GPU leaves to torch."""
    figure, axes = canvas(12, 4.4)
    at, allocated, reserved = (list(column) for column in zip(*gpu.curve, strict=True))
    _draw_phases(axes, gpu)
    blue, red = COLOURS["parameter"], COLOURS["gradient"]
    heights = [nbytes / GIB for nbytes in allocated]
    axes.fill_between(at, heights, step="post", color=blue, alpha=0.25, linewidth=0)
    axes.plot(at, heights, drawstyle="steps-post", color=blue, linewidth=1.2, label="allocated")
    axes.plot(
        at, [nbytes / GIB for nbytes in reserved], drawstyle="steps-post", color=red, linewidth=1.2, label="reserved"
    )
    _draw_gpu(axes, account, gpu, emulation)
    if shortage is not None and shortage.gpu == gpu.index:
        _draw_oom(axes, shortage, at[-1])
    axes.set_xlim(0, max(gpu.events, 1))
    axes.set_xlabel("allocations and frees, in order")
    axes.set_ylabel("GiB")
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(alignment="left", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _draw_phases(axes: Axes, gpu: GpuAccount) -> None:
    """Mark backward and step as stripes if there are few, and the end of the start."""
    spans = gpu.spans
    ends = [*(span.start for span in spans[1:]), gpu.events][: len(spans)]
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


def _draw_gpu(axes: Axes, account: Account, gpu: GpuAccount, emulation: Emulation) -> None:
    """Draw the GPU's line, and below it the non-torch memory; only text if both are far above the curve."""
    usable = emulation.gpu.usable_bytes
    non_torch = emulation.non_torch(account)
    top = max(gpu.peak_reserved_bytes, 1)
    words = f"usable {gib(usable)}, less CUDA and NCCL"
    if usable > 2 * top:
        axes.text(0.995, 0.985, f"{words}: above", transform=axes.transAxes, va="top", ha="right", bbox=BEHIND)
        axes.set_ylim(0, 1.2 * top / GIB)
        return
    draw_usable(axes, usable / GIB, words)
    axes.axhspan(
        (usable - non_torch.high_bytes) / GIB, usable / GIB, color=COLOURS["temporary"], alpha=0.6, linewidth=0
    )
    axes.set_ylim(0, 1.15 * max(usable, top) / GIB)


def _draw_oom(axes: Axes, oom: EmulatedOom, end: int) -> None:
    """Mark where the process ran out of memory: at the end of its curve."""
    height = (oom.allocated_bytes + oom.asked_bytes) / GIB
    highest = axes.get_ylim()[1]
    axes.annotate(
        f"out of memory: {gib(oom.asked_bytes)} more requested",
        (end, min(height, highest)),
        xytext=(-10, -22),
        textcoords="offset points",
        ha="right",
        fontweight="bold",
        bbox=BEHIND,
    )
