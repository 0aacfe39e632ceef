"""How long, for how much, and what beside the card: the same lines for the terminal and the page."""

from __future__ import annotations

from bigdit.report.words import between, gibs, number, size, span
from bigdit.search.plan import Plan
from bigdit.units import gib


def speed(plan: Plan, most: int | None = None) -> dict[str, str]:
    """Step with the `most` longest of its parts, images a second, the whole run, money, and where all that is from."""
    step, rate = plan.chosen.step, plan.chosen.images_per_second_per_card
    parts = sorted(step.parts.items(), key=lambda part: -part[1].high)
    said = [f"{name} {span(part)}" for name, part in parts[:most] if part.high > 0]
    said += ["and less"] if len(parts[:most]) < len(parts) else []
    found = {
        "step": f"{span(step.seconds)}: {', '.join(said)}",
        "speed": f"{between(rate)} images/s a card",
    }
    gpus = plan.question.cluster.gpus
    if gpus > 1:
        found["speed"] += f", {between(rate * gpus)} over {gpus} cards"
    if plan.run is not None:
        images = f"{plan.question.images:,} images × {plan.question.epochs:g} epoch{_s(plan.question.epochs)}, "
        found["run"] = f"{images if plan.question.images else ''}{plan.run.steps:,} steps: {span(plan.run.seconds)}"
        found["cost"] = f"{between(plan.run.gpu_hours)} GPU-hours"
        if plan.run.money is not None:
            found["cost"] += f", {between(plan.run.money)} at {number(plan.question.price or 0)} an hour a card"
    found["from"] = plan.calibration
    return found


def needs(plan: Plan, *, notes: bool = True) -> dict[str, str]:
    """What the host holds, and what the encoded data set takes of a disk and of time; `notes` say how that is known."""
    host, data = plan.host, plan.dataset
    found = {
        "host RAM": f"{gib(host.process_bytes)} of tensors a process ({gib(host.page_locked_bytes)} page-locked), "
        f"{gib(host.checkpoint_bytes)} more while it saves; "
        f"{size(host.node_bytes)} a machine of {host.processes_per_node} process{_s(host.processes_per_node, 'es')}"
    }
    if data is not None:
        text = gibs(data.text_bytes.low, data.text_bytes.high)
        found["disk"] = (
            f"{gibs(data.store_bytes.low, data.store_bytes.high)} for {data.images:,} encoded images; each "
            f"{gib(data.latent_bytes)} of latents and {text} of text ({gib(data.padded_text_bytes)} padded)"
        )
        if data.extraction_seconds is not None:
            found["encoding"] = f"{span(data.extraction_seconds)} over all cards"
        if notes and data.notes:
            found["known by"] = "; ".join(data.notes)
    return found


def _s(amount: float, ending: str = "s") -> str:
    return "" if amount == 1 else ending
