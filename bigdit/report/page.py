"""A plan as one page of HTML that needs nothing beside it: no network, no other file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from bigdit.memory import CATEGORIES, PhasePeak, Timeline
from bigdit.report import words
from bigdit.report.figures import COLOURS, curves_figure, front_figure, timeline_figure
from bigdit.report.how_to_run import commands, obstacle
from bigdit.report.html import DARK, inline, render, variable
from bigdit.report.plan import needs, speed
from bigdit.search.plan import OPTIMIZER_TITLES, Estimate, Plan
from bigdit.strategy import Strategy
from bigdit.units import count, gib, how_many

COLUMNS = 400
"""Points of memory over time on the page: enough for its width, and a tenth of the bytes of all."""


class Piece(NamedTuple):
    """A part of a bar: its name, its colour on the page, its bytes, and its share of the bar's whole length in %."""

    name: str
    colour: str
    nbytes: int
    percent: float


class Bar(NamedTuple):
    """A stacked bar with its name, what it adds up to in words, and what is to be marked about it."""

    name: str
    total: str
    pieces: Sequence[Piece]
    mark: str = ""


def page(plan: Plan, folder: Path | None = None, others: Sequence[Plan] = ()) -> str:
    """The page, with the commands that run the plan from its `folder`, and with what ran for the `others`: plans for
    other numbers of GPUs."""
    filters = {"gib": gib, "size": words.size, "count": count, "between": words.between}
    return render("plan.html", filters, _found(plan, folder, others))


def _found(plan: Plan, folder: Path | None, others: Sequence[Plan]) -> dict[str, Any]:
    """All that the template shows."""
    usable = plan.question.gpu.usable_bytes
    longest = max(usable, plan.chosen.process.high_bytes)
    return {
        "plan": plan,
        "words": words,
        "usable": usable,
        "colours": {variable(category): (COLOURS[category], DARK[category]) for category in CATEGORIES},
        "settings": words.settings(plan.chosen, plan),
        "speed": speed(plan),
        "needs": needs(plan),
        "facts": _facts(plan),
        "card": _card_bar(plan, longest),
        "card_line": 100 * usable / longest,
        "phases": _phase_bars(plan),
        "categories": [name for name in CATEGORIES if any(name in phase.at_peak for phase in plan.ledger.phases)],
        "variable": variable,
        "waterfall": _waterfall(plan),
        "explained": words.EXPLAINED,
        "waterfall_line": 100 * usable / max([usable, *(step.process_bytes for step in plan.waterfall)]),
        "timeline": _timeline(plan),
        "curves": _curves(plan) if plan.curves else None,
        "front": _front(plan) if len(plan.front) > 1 else None,
        "commands": [
            (command.comment, "\n".join(command.lines()))
            for command in (commands(plan, folder) if folder and obstacle(plan) is None else ())
        ],
        "blocks": words.blocks(plan),
        "whatif": whatif(plan, others),
        "numbers": [each.question.cluster.gpus for each in (plan, *others)],
    }


def _facts(plan: Plan) -> dict[str, tuple[str, str]]:
    """The figures at the top: name, value, and what it means."""
    chosen, gpus = plan.chosen, plan.question.cluster.gpus
    left = chosen.headroom_bytes
    found = {
        "left on the GPU" if left >= 0 else "too much": (
            gib(abs(left)),
            f"of {gib(plan.question.gpu.usable_bytes)}",
        ),
        "micro-batch": (str(chosen.strategy.micro_batch_size), f"{chosen.strategy.global_batch_size:,} a step"),
        f"{words.samples(plan)}/s per GPU": (
            words.between(chosen.samples_per_second_per_gpu),
            how_many(gpus, "GPU"),
        ),
    }
    if plan.run is not None:
        found["whole run"] = (words.span(plan.run.seconds), how_many(plan.run.steps, "step"))
        if plan.run.money is not None:
            found["cost"] = (words.between(plan.run.money), f"{words.between(plan.run.gpu_hours)} GPU-hours")
        else:
            found["GPU-hours"] = (words.between(plan.run.gpu_hours), "on all GPUs")
    return found


def _card_bar(plan: Plan, longest: int) -> Bar:
    """The process at its peak: allocated, idle in the allocator, the safety margin, and what is not torch's."""
    held, ledger = words.held(plan), plan.ledger
    pieces = _pieces(ledger.deciding, longest)
    idle = max(held.pop("reserved by torch") - ledger.peak_allocated_bytes, 0)
    process = held.popitem()[1]
    more = {"idle in the allocator": ("--idle", idle)}
    more |= {name: ("--beside", nbytes) for name, nbytes in held.items()}
    pieces += [Piece(name, colour, nbytes, 100 * nbytes / longest) for name, (colour, nbytes) in more.items()]
    return Bar("the process at its peak", gib(process), pieces)


def _phase_bars(plan: Plan) -> list[Bar]:
    highest = plan.ledger.peak_allocated_bytes
    return [
        Bar(
            phase.phase,
            gib(phase.peak_bytes),
            _pieces(phase, highest),
            "peak" if phase is plan.ledger.deciding else "",
        )
        for phase in plan.ledger.phases
    ]


def _pieces(phase: PhasePeak, longest: int) -> list[Piece]:
    return [
        Piece(category, variable(category), nbytes, 100 * nbytes / longest)
        for category, nbytes in phase.at_peak.items()
    ]


def _waterfall(plan: Plan) -> list[tuple[str, str, str, str, float]]:
    """A row for each change: the change, why it saves, the memory after it, the verdict, the bar's length in %."""
    longest = max([plan.question.gpu.usable_bytes, *(step.process_bytes for step in plan.waterfall)])
    return [
        (step.change, step.saved_by, gib(step.process_bytes), step.verdict, 100 * step.process_bytes / longest)
        for step in plan.waterfall
    ]


def _timeline(plan: Plan) -> Markup:
    ledger = plan.ledger
    figure = timeline_figure(
        Timeline.unpack(plan.packed_timeline), title="", card_bytes=plan.question.gpu.usable_bytes, most=COLUMNS
    )
    peaks = ", ".join(f"{phase.phase} {gib(phase.peak_bytes)}" for phase in ledger.phases)
    peak = ledger.deciding.phase
    said = f"Allocated memory from the engine's start through two steps. Peaks: {peaks}. Peak phase: {peak}."
    return inline(figure, "timeline", "Memory over time", said)


def _curves(plan: Plan) -> Markup:
    limit = gib(plan.question.gpu.usable_bytes)
    ends = "; ".join(
        f"{label}: {gib(curve[min(curve)])} at {min(curve)} to {gib(curve[max(curve)])} at {max(curve)}"
        for label, curve in plan.curves.items()
    )
    said = f"Peak of the process against the micro-batch size, with the GPU's {limit}. {ends}."
    return inline(curves_figure(plan), "curves", "Memory against the micro-batch size", said)


def _front(plan: Plan) -> Markup:
    said = (
        f"{words.samples(plan).capitalize()} a second per GPU against the peak of the process; the points are the "
        "numbered rows of the table below."
    )
    return inline(front_figure(plan), "front", "Memory against speed", said)


CARDS = {"cards": "Number of GPUs"}
FIELDS = (
    *("micro_batch_size", "checkpointed_blocks", "phase", "at_peak", "peak_allocated_bytes", "peak_reserved_bytes"),
    *("process", "host_bytes", "verdict", "samples_per_second_per_gpu"),
)
"""Of a point, as the page's script names its values."""


def whatif(plan: Plan, others: Sequence[Plan] = ()) -> dict[str, Any] | None:
    """All that the page's script is given, for JSON: what ran for the plan, and for the `others`: plans for other
    numbers of GPUs. None if nothing ran that can be compared."""
    if not plan.ran:
        return None
    options = [(each, ran) for each in (plan, *others) for ran in by_option(each).values()]
    chosen = (CARDS if others else {}) | choices([ran[0].strategy for _, ran in options])
    return {
        "choices": chosen,
        "fields": FIELDS,
        "settings": [_setting(each, ran, chosen) for each, ran in options],
        "start": start(plan),
        "categories": {name: variable(name) for name in CATEGORIES},
        "samples": words.samples(plan),
    }


def by_option(plan: Plan) -> dict[str, list[Estimate]]:
    """All that ran, by the title of its option."""
    found: dict[str, list[Estimate]] = {}
    for each in plan.ran:
        found.setdefault(each.option, []).append(each)
    return found


def start(plan: Plan) -> dict[str, Any]:
    """What is shown first: the recommended strategy."""
    chosen = plan.chosen
    ran = [each.blocks for each in by_option(plan)[chosen.option]]
    blocks = max(ran) if chosen.strategy.checkpointed_blocks == "all" else chosen.blocks
    size, gpu = chosen.micro_batch_size, plan.question.gpu.title
    return {"strategy": chosen.option, "micro-batch": size, "blocks": blocks, "gpu": gpu}


def choices(strategies: Collection[Strategy]) -> dict[str, str]:
    """The choices besides sizes and GPU, by key: their names on the page."""
    found = {"engine": "Engine", "optimizer": "Optimizer", "precision": "Precision", "average": "EMA"}
    if any(each.lora for each in strategies):
        found["adapters"] = "Adapters"
    if any(each.blocks_to_swap for each in strategies):
        found["weights"] = "Weights"
    return found | {"kept": "Kept of recomputed blocks"}


def _setting(plan: Plan, ran: Sequence[Estimate], chosen: Collection[str]) -> dict[str, Any]:
    first, question = ran[0], plan.question
    return {
        "strategy": first.option,
        "words": {key: text for key, text in _words(first.strategy).items() if key in chosen},
        "nonTorch": first.non_torch.high_bytes,
        "rooms": [{"card": title, "usable_bytes": nbytes} for title, nbytes in plan.same_kernels.items()],
        "hostMemory": question.host_memory_bytes,
        "hostAssumed": question.host_assumed,
        "points": [_point(each, plan) for each in ran],
    }


def _words(strategy: Strategy) -> dict[str, str]:
    adapters = strategy.lora
    return {
        "cards": str(strategy.world_size),
        "engine": words.engine(strategy),
        "optimizer": OPTIMIZER_TITLES[strategy.optimizer.name],
        "precision": words.PRECISIONS[strategy.precision],
        "average": words.average(strategy),
        "adapters": f"LoRA of rank {adapters.rank} over a frozen {adapters.base} base" if adapters else "none",
        "weights": f"{strategy.blocks_to_swap} blocks in CPU memory" if strategy.blocks_to_swap else "on the GPU",
        "kept": "nothing" if strategy.checkpointing == "full" else "matrix products and attention",
    }


def _point(each: Estimate, plan: Plan) -> list[Any]:
    """The values of FIELDS, without their names, in a third of the bytes. Bytes by category are in the order of
    CATEGORIES, and those of the recorded strategy alone; the speed is in words."""
    at_peak = plan.ledger.at_peak if each.strategy == plan.chosen.strategy else {}
    return [
        each.micro_batch_size,
        each.blocks,
        each.peak_phase,
        [at_peak.get(name, 0) for name in CATEGORIES],
        each.peak_allocated_bytes,
        each.peak_reserved_bytes,
        [each.process.low_bytes, each.process.high_bytes],
        each.host_bytes,
        each.verdict,
        words.between(each.samples_per_second_per_gpu),
    ]
