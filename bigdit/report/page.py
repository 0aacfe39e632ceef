"""A plan's HTML page, which is self-contained; the folder of its files; and `bigdit.plan(...)` for notebooks."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from bigdit import log
from bigdit.config.plan_file import DS_CONFIG, FILE, read_plan_file, text_digest, write_plan_file
from bigdit.errors import UserError
from bigdit.files import TEMPORARY, check_ours, check_writable, commit_folder, read_bytes, write_json, write_text
from bigdit.memory import CATEGORIES, PhasePeak, Timeline
from bigdit.report import words
from bigdit.report.figures import curves_figure, front_figure, save, timeline_figure
from bigdit.report.how_to_run import RUN, as_yaml, commands, obstacle, renewed, skeleton
from bigdit.report.html import inline, render, variable
from bigdit.report.plan import needs, speed
from bigdit.search.answer import make_plan
from bigdit.search.of_run import planned_run
from bigdit.search.plan import Estimate, Plan, record
from bigdit.search.request import OPTIONS
from bigdit.search.resolve import resolve_request
from bigdit.strategy import OPTIMIZERS, Strategy
from bigdit.units import count, gib, how_many

COLUMNS = 400
"""Points of memory over time on the page: enough for its width, in a tenth of the bytes."""


class Piece(NamedTuple):
    """A part of a bar: name, CSS colour, bytes, and its share of the length in %."""

    name: str
    colour: str
    nbytes: int
    percent: float


class Bar(NamedTuple):
    """A stacked bar: name, total as text, and an optional mark."""

    name: str
    total: str
    pieces: Sequence[Piece]
    mark: str = ""


def page(plan: Plan, folder: Path | None = None, others: Sequence[Plan] = ()) -> str:
    """The page, with the commands for the plan in `folder`, and the what-if of `others`: plans for other numbers of
    GPUs."""
    filters = {"gib": gib, "size": words.size, "count": count, "between": words.between}
    return render("plan.html", filters, _found(plan, folder, others))


def _found(plan: Plan, folder: Path | None, others: Sequence[Plan]) -> dict[str, Any]:
    """The values of the template."""
    usable = plan.request.usable_bytes
    longest = max(usable, plan.chosen.process.high_bytes)
    return {
        "plan": plan,
        "words": words,
        "usable": usable,
        "settings": words.settings(plan.chosen, plan),
        "speed": speed(plan),
        "needs": needs(plan),
        "facts": _facts(plan),
        "gpu_bar": _gpu_bar(plan, longest),
        "gpu_line": 100 * usable / longest,
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
        "numbers": [each.request.cluster.gpus for each in (plan, *others)],
    }


def _facts(plan: Plan) -> dict[str, tuple[str, str]]:
    """The figures at the top: name, value and explanation."""
    chosen, gpus = plan.chosen, plan.request.cluster.gpus
    left = chosen.headroom_bytes
    found = {
        "left on the GPU" if left >= 0 else "too much": (
            gib(abs(left)),
            f"of {gib(plan.request.usable_bytes)}",
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


def _gpu_bar(plan: Plan, longest: int) -> Bar:
    """The process at its peak: allocated, idle in the allocator, safety margin, and non-torch memory."""
    held, ledger = words.held(plan), plan.ledger
    pieces = _pieces(ledger.deciding, longest)
    idle = max(held.pop("reserved by torch") - ledger.peak_allocated_bytes, 0)
    process = held.popitem()[1]
    more = {"idle in the allocator": ("--idle", idle)}
    more |= {name: ("--non-torch", nbytes) for name, nbytes in held.items()}
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
    """For each change: the change, why it saves memory, the memory after it, the verdict, the bar's length in %."""
    longest = max([plan.request.usable_bytes, *(step.process_bytes for step in plan.waterfall)])
    return [
        (step.change, step.saved_by, gib(step.process_bytes), step.verdict, 100 * step.process_bytes / longest)
        for step in plan.waterfall
    ]


def _timeline(plan: Plan) -> Markup:
    ledger = plan.ledger
    figure = timeline_figure(
        Timeline.unpack(plan.packed_timeline), title="", gpu_bytes=plan.request.usable_bytes, most=COLUMNS
    )
    peaks = ", ".join(f"{phase.phase} {gib(phase.peak_bytes)}" for phase in ledger.phases)
    peak = ledger.deciding.phase
    description = f"Allocated memory from the engine's start through two steps. Peaks: {peaks}. Peak phase: {peak}."
    return inline(figure, "timeline", "Memory over time", description)


def _curves(plan: Plan) -> Markup:
    limit = gib(plan.request.usable_bytes)
    ends = "; ".join(
        f"{label}: {gib(curve[min(curve)])} at {min(curve)} to {gib(curve[max(curve)])} at {max(curve)}"
        for label, curve in plan.curves.items()
    )
    description = f"Peak of the process against the micro-batch size, with the GPU's {limit}. {ends}."
    return inline(curves_figure(plan), "curves", "Memory against the micro-batch size", description)


def _front(plan: Plan) -> Markup:
    description = (
        f"{words.samples(plan).capitalize()} a second per GPU against the peak of the process; the points are the "
        "numbered rows of the table below."
    )
    return inline(front_figure(plan), "front", "Memory against speed", description)


GPUS = {"gpus": "Number of GPUs"}
FIELDS = (
    *("micro_batch_size", "checkpointed_blocks", "phase", "at_peak", "peak_allocated_bytes", "peak_reserved_bytes"),
    *("process", "host_bytes", "verdict", "samples_per_second_per_gpu"),
)
"""The values of a point, by their names in the page's script."""


def whatif(plan: Plan, others: Sequence[Plan] = ()) -> dict[str, Any] | None:
    """The JSON for the page's script: all attempts of the plan and of `others`, plans for other numbers of GPUs. None
    without attempts."""
    if not plan.ran:
        return None
    options = [(each, ran) for each in (plan, *others) for ran in by_option(each).values()]
    chosen = (GPUS if others else {}) | choices([ran[0].strategy for _, ran in options])
    return {
        "choices": chosen,
        "fields": FIELDS,
        "settings": [_setting(each, ran, chosen) for each, ran in options],
        "start": start(plan),
        "categories": {name: variable(name) for name in CATEGORIES},
        "samples": words.samples(plan),
    }


def by_option(plan: Plan) -> dict[str, list[Estimate]]:
    """All attempts, by the title of their option."""
    found: dict[str, list[Estimate]] = {}
    for each in plan.ran:
        found.setdefault(each.option, []).append(each)
    return found


def start(plan: Plan) -> dict[str, Any]:
    """The choices that the page shows first: the recommended strategy."""
    chosen = plan.chosen
    ran = [each.blocks for each in by_option(plan)[chosen.option]]
    blocks = max(ran) if chosen.strategy.checkpointed_blocks == "all" else chosen.blocks
    size, gpu = chosen.micro_batch_size, next(iter(plan.same_kernels))
    return {"strategy": chosen.option, "micro-batch": size, "blocks": blocks, "gpu": gpu}


def choices(strategies: Collection[Strategy]) -> dict[str, str]:
    """The choices other than sizes and GPU: their names on the page by key."""
    found = {"engine": "Engine", "optimizer": "Optimizer", "precision": "Precision", "ema": "EMA"}
    if any(each.lora for each in strategies):
        found["adapters"] = "Adapters"
    if any(each.blocks_to_swap for each in strategies):
        found["weights"] = "Weights"
    return found | {"kept": "Kept of recomputed blocks"}


def _setting(plan: Plan, ran: Sequence[Estimate], chosen: Collection[str]) -> dict[str, Any]:
    first, request = ran[0], plan.request
    return {
        "strategy": first.option,
        "words": {key: text for key, text in _words(first.strategy).items() if key in chosen},
        "nonTorch": first.non_torch.high_bytes,
        "rooms": [{"gpu": title, "usable_bytes": nbytes} for title, nbytes in plan.same_kernels.items()],
        "hostMemory": request.host_memory_bytes,
        "hostAssumed": request.host_assumed,
        "points": [_point(each, plan) for each in ran],
    }


def _words(strategy: Strategy) -> dict[str, str]:
    adapters = strategy.lora
    return {
        "gpus": str(strategy.world_size),
        "engine": words.engine(strategy),
        "optimizer": OPTIMIZERS[strategy.optimizer.name],
        "precision": words.precision(strategy),
        "ema": words.ema(strategy),
        "adapters": f"LoRA of rank {adapters.rank} over a frozen {adapters.base} base" if adapters else "none",
        "weights": f"{strategy.blocks_to_swap} blocks in CPU memory" if strategy.blocks_to_swap else "on the GPU",
        "kept": "nothing" if strategy.checkpointing == "full" else "matrix products and attention",
    }


def _point(each: Estimate, plan: Plan) -> list[Any]:
    """The values of FIELDS without their names, which would triple the bytes.

    Bytes by category are in the order of CATEGORIES, and only of the recorded strategy; the speed is text.
    """
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


JSON, PAGE, MEMORY, CURVE = "plan.json", "report.html", "memory.png", "curve.png"
OURS = {FILE, DS_CONFIG, JSON, PAGE, MEMORY, CURVE, RUN}


def check_folder(folder: Path) -> None:
    """Raise UserError, before a plan is made, if it could not be written to `folder`."""
    _kept_run(folder)
    check_writable("--out", folder)


def write_plan(plan: Plan, folder: Path, others: Sequence[Plan] = (), run: str | None = None) -> list[Path]:
    """Write all files of `plan`, or none. They replace those of an older plan; of an edited run.yaml only the strategy.

    `run`: the text of run.yaml, if not the plan's own. The page also shows `others`: plans for other numbers of GPUs.
    Raises UserError if `folder` holds files that no plan wrote, or if it cannot be written.
    """
    kept = _kept_run(folder)
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        _fill(plan, others, temporary, folder, run or (skeleton(plan) if kept is None else renewed(kept, plan)))
        commit_folder(temporary, folder)
    except OSError as error:
        raise UserError(f"--out: cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(folder.iterdir())


def write_stages(
    plans: Sequence[Plan], out: Path, folders: Sequence[Path], config: Path, overrides: Sequence[str]
) -> None:
    """Write the plans of a run's stages to their `folders`, and the run with their strategies to `out`.

    Without stages both are written to `out`.
    """
    strategies = [plan.chosen.strategy for plan in plans]
    text = as_yaml(
        planned_run(config, overrides, strategies, [str((each / FILE).relative_to(out)) for each in folders])
    )
    if [*folders] == [out]:
        write_plan(plans[0], out, run=text)
        return
    for plan, folder in zip(plans, folders, strict=True):
        write_plan(plan, folder)
    write_text(out / RUN, text)


def _fill(plan: Plan, others: Sequence[Plan], temporary: Path, folder: Path, run: str | None) -> None:
    write_plan_file(temporary / FILE, record(plan, run))
    write_text(temporary / JSON, document(plan))
    if plan.chosen.strategy.ds_config is not None:
        write_json(temporary / DS_CONFIG, plan.chosen.strategy.ds_document)
    if run is not None:
        write_text(temporary / RUN, run)
    title = f"{plan.request.model.name} on {words.subject(plan)}, {plan.chosen.title}"
    usable = plan.request.usable_bytes
    memory = timeline_figure(Timeline.unpack(plan.packed_timeline), title=title, gpu_bytes=usable)
    save(memory, temporary / MEMORY)
    if plan.curves:
        save(curves_figure(plan), temporary / CURVE)
    write_text(temporary / PAGE, page(plan, folder, others=others))


def document(plan: Plan) -> str:
    """`plan` as JSON: as `--json` prints it, with timeline and all attempts."""
    return json.dumps(plan.model_dump(mode="json") | {"fits": plan.fits}, indent=2) + "\n"


def _kept_run(folder: Path) -> str | None:
    """The run.yaml in `folder`, if it was edited. Raises UserError unless a plan may replace the folder."""
    found = check_ours(folder, "plan", FILE, OURS)
    try:
        text = read_bytes(folder / RUN).decode() if RUN in found else None
        known = read_plan_file(folder / FILE).run_digest
    except (OSError, ValueError, UserError):  # of another version, or damaged: keep the run.yaml
        known = None
    return None if text is None or text_digest(text) == known else text


_OPTION = re.compile(r"(?<!\S)--([a-z-]+)")

HEIGHT = 900
"""Height of the page in a notebook, in pixels."""


class Answer(Plan):
    """A plan that notebooks show as a page."""

    def _repr_html_(self) -> str:
        """The page in a frame, which isolates its style."""
        return f'<iframe srcdoc="{escape(page(self))}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'


def plan(model: str | None = None, gpu: str | None = None, **options: Any) -> Answer:
    """The plan for these options of `bigdit plan`, with the same defaults."""
    try:
        request = resolve_request(model, gpu, **options)
    except UserError as error:  # name arguments, not options
        lines = [_OPTION.sub(lambda found: found[1].replace("-", "_"), line) for line in error.problems]
        raise UserError(*lines) from None
    with log.status(f"planning the training of {request.model.name}") as status:
        return Answer(**dict(make_plan(request, progress=status)))


_HELP = "\n".join(f"{name}: {known['help']}" for name, known in OPTIONS.items())
plan.__doc__ = f"{plan.__doc__}\n\n{_HELP}"
plan.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in OPTIONS],
    return_annotation=Plan.__name__,
)
