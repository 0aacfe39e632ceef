"""A plan in the terminal, the most important first, in 80 columns and readable without colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from bigdit import log
from bigdit.memory import Ledger
from bigdit.memory.process import ByteRange
from bigdit.report import words
from bigdit.report.how_to_run import RUN, commands, obstacle
from bigdit.report.tables import DASH, WIDEST, lines, table
from bigdit.report.words import between, gibs, number, samples, size, span
from bigdit.search.plan import Estimate, Plan
from bigdit.speed.seconds import Handed, Interval
from bigdit.units import count, gib, how_many

PARTS = 3
"""The most parts of a step's time that are shown."""
MOST_ROWS = 5
"""The most rows of the front in the terminal; report.html and --json have all."""
OTHERS = 2
"""The most of these rows that are lossy if the recommended strategy is lossless, or the reverse."""

_VERDICTS = {"FITS": "fits", "TIGHT": "tight", "DOES NOT FIT": "no"}
_STYLES = {"FITS": "bold green", "TIGHT": "bold yellow", "DOES NOT FIT": "bold red"}


def show(plan: Plan, folder: Path | None = None, console: Console | None = None) -> None:
    """Print `plan`; `folder`: where its files were written, if they were."""
    console = console or log.out
    for part in (
        _headline(plan),
        *([] if plan.fits else [_would_fit(plan)]),
        lines("recommended" if plan.fits else "nearest to fitting", _recommended(plan)),
        lines("speed and cost", speed(plan, PARTS)),
        _memory(plan, console),
        *([_waterfall(plan)] if plan.waterfall else []),
        *([_limits(plan)] if plan.buckets else []),
        *([lines("largest micro-batch", {"any size": words.NO_LIMIT})] if plan.short_of_host else []),
        *([_choices("alternatives", plan.front, plan)] if len(plan.front) > 1 else []),
        *([_rejected(plan)] if plan.rejected else []),
        lines("CPU memory and disk", needs(plan, notes=False)),
    ):
        console.print(part, highlight=False)
        console.print()
    for notice in plan.notices:
        console.print(f"note: {notice}", highlight=False, markup=False)
    _print_commands(plan, folder, console)


def show_short(plan: Plan, name: str) -> None:
    """Print verdict, settings, duration (if the number of samples is known) and CPU memory of the plan for `name`."""
    found = _recommended(plan)
    if plan.run is not None:
        found["run"] = speed(plan)["run"]
    found["CPU memory"] = needs(plan, notes=False)["CPU memory"]
    log.out.print(_headline(plan))
    log.out.print(lines(name, found), highlight=False)
    for notice in plan.notices:
        log.out.print(f"note: {notice}", highlight=False, markup=False)
    log.out.print()


def _would_fit(plan: Plan) -> RenderableType:
    title = "what would fit"
    return _choices(title, plan.fixes, plan) if plan.fixes else lines(title, {"none": words.NO_FIX})


def _headline(plan: Plan) -> RenderableType:
    request = plan.request
    sides = " × ".join(str(side) for side in request.resolution)
    frames = f", {how_many(request.frames, 'frame')}" if request.frames else ""
    head = Table.grid()
    head.add_row(
        Text.assemble(
            (request.model.name, "bold"),
            f", {count(plan.params)} parameters, {sides} pixels{frames}, on {words.subject(plan)}",
        )
    )
    head.add_row("")
    head.add_row(Text.assemble((plan.verdict, _STYLES[plan.verdict]), f"{words.numerics(plan)}: {words.verdict(plan)}"))
    for line in (*words.host(plan), words.accuracy(plan)):
        head.add_row(Text(line))
    return head


def _recommended(plan: Plan) -> dict[str, str]:
    return words.settings(plan.chosen, plan) | {"why": words.why(plan.chosen)}


def _memory(plan: Plan, console: Console) -> Table:
    """Peaks by phase and the GPU's memory on the left; bytes at the peak on the right, or below if it is narrow."""
    left = Table.grid()
    for part in (_phases(plan), "", _gpu(plan)):
        left.add_row(part)
    sides = Table.grid(padding=(0, 4, 0, 0), pad_edge=False)
    sides.add_row(left, at_peak(plan.ledger))
    if console.measure(sides, options=console.options.update(max_width=WIDEST)).maximum <= console.width:
        return sides
    for part in ("", at_peak(plan.ledger)):
        left.add_row(part)
    return left


def _phases(plan: Plan) -> Table:
    rows = table("memory by phase", ["phase", "peak"], numeric=["peak"])
    for phase in plan.ledger.phases:
        mark = "◂ " if phase is plan.ledger.deciding else ""
        rows.add_row(phase.phase, mark + gib(phase.peak_bytes))
    rows.caption = "◂ peak phase"
    return rows


def _gpu(plan: Plan) -> Table:
    rows = table("GPU memory, at most", ["part", "bytes"], numeric=["bytes"])
    rows.show_header = False
    for name, nbytes in words.held(plan).items():
        rows.add_row(name, gib(nbytes))
    rows.add_row("usable", gib(plan.request.usable_bytes))
    rows.add_row("left", gib(plan.chosen.headroom_bytes))
    return rows


def at_peak(ledger: Ledger) -> Table:
    """Bytes allocated at the peak by category, with their shares."""
    title = f"allocated at the peak, in {ledger.deciding.phase}"
    rows = table(title, ["category", "bytes", "share"], ["bytes", "share"])
    total = ledger.peak_allocated_bytes
    for category, nbytes in ledger.at_peak.items():
        rows.add_row(category, gib(nbytes), f"{100 * nbytes / total:.1f} %")
    rows.add_section()
    rows.add_row("total allocated", gib(total), "100.0 %" if total else DASH)
    return rows


def phases(ledger: Ledger) -> Table:
    """Each phase's peak, and what it leaves allocated; the peak phase is marked."""
    columns = ["peak allocated", "left at its end"]
    rows = table("by phase", ["phase", *columns], numeric=columns)
    for phase in ledger.phases:
        mark = "◂ " if phase is ledger.deciding else ""
        rows.add_row(phase.phase, mark + gib(phase.peak_bytes), gib(phase.end_bytes))
    rows.caption = "◂ peak phase; phases are not summed"
    return rows


def process(reserved_bytes: int, non_torch: ByteRange, usable_bytes: int) -> Table:
    """From torch's reserved memory to the process in nvidia-smi, and what is left of the GPU."""
    rows = table("on the GPU", ["", "low", "high"], numeric=["low", "high"])
    parts = non_torch.low_bytes, non_torch.high_bytes
    shown = [reserved_bytes + part for part in parts]
    rows.add_row("reserved by torch", gib(reserved_bytes), gib(reserved_bytes))
    rows.add_row("CUDA context and NCCL", *map(gib, parts))
    rows.add_section()
    rows.add_row("process, as in nvidia-smi", *map(gib, shown))
    rows.add_row("usable bytes of the GPU", gib(usable_bytes), gib(usable_bytes))
    rows.add_row("left", *(gib(usable_bytes - nbytes) for nbytes in shown))
    return rows


def _waterfall(plan: Plan) -> Table:
    rows = table(
        "from the usual setting to this one", ["GPU memory", "fits", "change and what it does"], ["GPU memory"]
    )
    for step in plan.waterfall:
        rows.add_row(
            gib(step.process_bytes), _VERDICTS[step.verdict], Text.assemble((step.change, "bold"), f": {step.saved_by}")
        )
    rows.caption = f"each change is added to those above it; {words.EXPLAINED}"
    return rows


def _limits(plan: Plan) -> Table:
    heads = words.limits(plan)
    rows = table("largest micro-batch", ["pixels", *heads.values()], heads.values())
    for limit in plan.buckets:
        size = f"{limit.height} × {limit.width}"
        rows.add_row(size, *(words.largest(getattr(limit, key)) for key in heads))
    rows.caption = "; ".join(words.limited(plan))
    return rows


def _choices(title: str, choices: Sequence[Estimate], plan: Plan) -> Table:
    """Memory and speed of each choice; the recommended one is marked."""
    lossy = [choice for choice in choices if choice.lossless != plan.chosen.lossless][:OTHERS]
    own = [choice for choice in choices if choice not in lossy][: MOST_ROWS - len(lossy)]
    shown = [choice for choice in choices if choice in own or choice in lossy]
    if plan.chosen in choices and plan.chosen not in shown:
        shown[-1] = plan.chosen
    rate = f"{words.samples(plan)}/s"
    numbers = ["GPU memory", rate, "fits"]
    rows = table(title, [*numbers, "what and why"], numeric=numbers)
    for choice in shown:
        what = Text.assemble(
            ("▸ " if choice == plan.chosen else "", "bold"),
            (choice.title, "bold"),
            "" if choice == plan.chosen else f": {choice.reason}",
        )
        rows.add_row(
            gib(choice.process.high_bytes),
            words.between(choice.samples_per_second_per_gpu),
            _VERDICTS[choice.verdict],
            what,
        )
    notes = [f"{rate} per GPU", "each ran on an emulated GPU"]
    notes += ["▸ recommended"] if plan.chosen in shown and plan.fits else []
    notes += [f"{len(choices) - len(shown)} more in report.html and --json"] if len(choices) > len(shown) else []
    rows.caption = "; ".join(notes)
    return rows


def _rejected(plan: Plan) -> Table:
    made = Table.grid(padding=(0, 1, 0, 0))
    made.title, made.title_justify, made.title_style = "rejected", "left", "bold"
    for each in plan.rejected:
        made.add_row("-", Text.assemble((each.choice, "bold"), f": {each.reason}"))
    return made


def _print_commands(plan: Plan, folder: Path | None, console: Console) -> None:
    reason = obstacle(plan)
    if reason is not None:
        console.print(f"nothing to run: {reason}", highlight=False, markup=False)
        return
    if folder is None:
        console.print("to train: plan again with --out DIR; it writes run.yaml and prints the commands")
        return
    console.print(Text(f"to train: fill in {RUN} first, then run these commands", style="bold"))
    for command in commands(plan, folder):
        console.print(f"# {command.comment}", highlight=False, markup=False)
        for line in command.lines():
            console.print(line, soft_wrap=True, highlight=False, markup=False)


LEAST = 0.001
"""The smallest share of a step whose part is shown."""


def speed(plan: Plan, most: int | None = None) -> dict[str, str]:
    """Seconds of a step and its `most` longest parts, samples per second, the whole run, its cost, and the source."""
    step, rate = plan.chosen.step, plan.chosen.samples_per_second_per_gpu
    parts = sorted(((name, part) for name, part in step.parts.items() if part.high), key=lambda each: -each[1].high)
    longest = [(name, part) for name, part in parts[:most] if part.high >= LEAST * step.seconds.high]
    shown = [f"{name} {span(part, like=step.seconds)}" for name, part in longest]
    shown += ["and smaller parts"] if len(longest) < len(parts) else []
    found = {
        "step": f"{span(step.seconds)}: {', '.join(shown)}",
        "speed": f"{between(rate)} {samples(plan)}/s per GPU",
    }
    if step.launches is not None:
        found["launches"] = _launches(step.launches, step.parts.get("launches"))
    gpus = plan.request.cluster.gpus
    if gpus > 1:
        found["speed"] += f", {between(rate * gpus)} on {gpus} GPUs"
    if plan.run is not None:
        found["run"] = f"{_samples(plan)}{how_many(plan.run.steps, 'step')}: {span(plan.run.seconds)}"
        found["cost"] = f"{between(plan.run.gpu_hours)} GPU-hours"
        if plan.run.money is not None:
            found["cost"] += f", {between(plan.run.money)} at {number(plan.request.price or 0)} per GPU-hour"
    found["source"] = plan.calibration
    return found


def _samples(plan: Plan) -> str:
    """The number of samples and epochs."""
    images, validation, epochs = plan.request.images, plan.request.validated, plan.request.epochs
    if images is None:
        return ""
    rest = f" ({validation:,} for validation)" if validation else ""
    return f"{images - validation:,} {samples(plan)}{rest} × {epochs:g} epoch{_s(epochs)}, "


def _launches(handed: Handed, waits: Interval | None) -> str:
    """How many kernels are launched, the CPU time for it, and how long the GPU waits for them."""
    known = "counted on an emulated GPU" if handed.counted else "one for each operator"
    shown = f"{handed.count:,.0f} a step, {known}: {span(handed.seconds)} of CPU time"
    if handed.bound == "no":
        return f"{shown}, hidden behind kernels" + ("" if waits is None else f" except {span(waits)}")
    return f"{shown}; the step {'is' if handed.bound == 'yes' else 'may be'} bound by launches"


def needs(plan: Plan, *, notes: bool = True) -> dict[str, str]:
    """CPU memory, and disk and time for the encoded data set; `notes`: with what that is based on."""
    host, data, node = plan.host, plan.dataset, plan.host.node_bytes
    generating = f"; {size(host.samples_bytes, node)} to generate samples (text encoder, VAE)"
    assumed = f" ({gib(plan.request.host_memory_bytes)} assumed)" if plan.request.host_assumed else ""
    found = {
        "CPU memory": f"{size(node)} per machine of {host.processes_per_node} process"
        f"{_s(host.processes_per_node, 'es')}{assumed}; tensors per process: {size(host.process_bytes, node)} at most, "
        f"{size(host.steps_bytes, node)} in steps ({size(host.page_locked_bytes, node)} page-locked), "
        f"{size(host.checkpoint_bytes, node)} more while saving{generating if host.samples_bytes else ''}"
    }
    if data is not None:
        each = max(data.latent_bytes, data.padded_text_bytes)
        text = gibs(data.text_bytes.low, data.text_bytes.high, like=each)
        stored = gibs(data.store_bytes.low, data.store_bytes.high)
        found["disk"] = f"{stored} for {data.images:,} encoded {samples(plan)}"
        found["each"] = f"{size(data.latent_bytes, each)} of latents"
        if data.padded_text_bytes:
            found["each"] += f", {text} of text ({size(data.padded_text_bytes, each)} padded)"
        if data.extraction_seconds is not None:
            found["encoding"] = _encoding(plan, data.extraction_seconds)
        if notes and data.notes:
            found["based on"] = "; ".join(data.notes)
    return found


def _encoding(plan: Plan, seconds: Interval) -> str:
    """The time for encoding, with advice if it is longer than training."""
    shown = f"{span(seconds)} on all GPUs"
    if plan.run is None or seconds.middle <= plan.run.seconds.middle:
        return shown
    return (
        f"{shown}: longer than training ({span(plan.run.seconds, like=seconds)}). {samples(plan).capitalize()} "
        "that are encoded once serve all epochs and runs. Fewer of them for more epochs take less time. Several "
        "machines can share the work (bigdit extract --engine slurm or ray, or started on each)"
    )


def _s(amount: float, ending: str = "s") -> str:
    return "" if amount == 1 else ending
