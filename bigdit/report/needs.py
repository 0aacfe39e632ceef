"""Speed, cost, CPU memory and disk of a plan: the same lines for the terminal and the page."""

from __future__ import annotations

from bigdit.report.words import between, gibs, number, samples, size, span
from bigdit.search.plan import Plan
from bigdit.speed.seconds import Handed, Interval
from bigdit.units import gib, how_many

LEAST = 0.001
"""A share of the step: a part below it tells nothing, and would be `8.3e-05–0.00035 s`."""


def speed(plan: Plan, most: int | None = None) -> dict[str, str]:
    """Seconds of a step and its `most` longest parts, images a second, the whole run, its cost, and the source."""
    step, rate = plan.chosen.step, plan.chosen.samples_per_second_per_card
    parts = sorted(((name, part) for name, part in step.parts.items() if part.high), key=lambda each: -each[1].high)
    told = [(name, part) for name, part in parts[:most] if part.high >= LEAST * step.seconds.high]
    said = [f"{name} {span(part, like=step.seconds)}" for name, part in told]
    said += ["and less"] if len(told) < len(parts) else []
    found = {
        "step": f"{span(step.seconds)}: {', '.join(said)}",
        "speed": f"{between(rate)} {samples(plan)}/s per GPU",
    }
    if step.launches is not None:
        found["launches"] = _launches(step.launches, step.parts.get("launches"))
    gpus = plan.question.cluster.gpus
    if gpus > 1:
        found["speed"] += f", {between(rate * gpus)} on {gpus} GPUs"
    if plan.run is not None:
        found["run"] = f"{_seen(plan)}{how_many(plan.run.steps, 'step')}: {span(plan.run.seconds)}"
        found["cost"] = f"{between(plan.run.gpu_hours)} GPU-hours"
        if plan.run.money is not None:
            found["cost"] += f", {between(plan.run.money)} at {number(plan.question.price or 0)} per GPU-hour"
    found["from"] = plan.calibration
    return found


def _seen(plan: Plan) -> str:
    """The samples that are trained on, and how often."""
    images, validation, epochs = plan.question.images, plan.question.held_out, plan.question.epochs
    if images is None:
        return ""
    rest = f" ({validation:,} for validation)" if validation else ""
    return f"{images - validation:,} {samples(plan)}{rest} × {epochs:g} epoch{_s(epochs)}, "


def _launches(handed: Handed, waits: Interval | None) -> str:
    """How many kernels are launched, the CPU time for it, and how long the GPU waits for them."""
    known = "counted on an emulated GPU" if handed.counted else "one for each operator"
    said = f"{handed.count:,.0f} a step, {known}: {span(handed.seconds)} of CPU time"
    if handed.bound == "no":
        return f"{said}, hidden behind kernels" + ("" if waits is None else f" except {span(waits)}")
    return f"{said}; the step {'is' if handed.bound == 'yes' else 'may be'} bound by launches"


def needs(plan: Plan, *, notes: bool = True) -> dict[str, str]:
    """CPU memory, and the disk and time that the encoded data set takes; `notes` say what that is based on."""
    host, data, node = plan.host, plan.dataset, plan.host.node_bytes
    drawn = f"; {size(host.samples_bytes, node)} to generate samples (text encoder, VAE)" if host.samples_bytes else ""
    assumed = f" ({gib(plan.question.host_memory_bytes)} assumed)" if plan.question.host_assumed else ""
    found = {
        "CPU memory": f"{size(node)} per machine of {host.processes_per_node} process"
        f"{_s(host.processes_per_node, 'es')}{assumed}; tensors per process: {size(host.process_bytes, node)} at most, "
        f"{size(host.steps_bytes, node)} in steps ({size(host.page_locked_bytes, node)} page-locked), "
        f"{size(host.checkpoint_bytes, node)} more to save{drawn}"
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
    """How long it takes, and what to do if that is longer than training."""
    said = f"{span(seconds)} on all GPUs"
    if plan.run is None or seconds.middle <= plan.run.seconds.middle:
        return said
    return (
        f"{said}: longer than training ({span(plan.run.seconds, like=seconds)}). {samples(plan).capitalize()} that are "
        "encoded once serve all epochs and runs. Fewer of them for more epochs take less time. Several machines can "
        "share the work (bigdit extract --engine slurm or ray, or started on each)"
    )


def _s(amount: float, ending: str = "s") -> str:
    return "" if amount == 1 else ending
