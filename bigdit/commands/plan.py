"""`bigdit plan`: will it fit, how fast, what must be set, and why."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigdit.commands.options import Json, Set, listed, of_plans

if TYPE_CHECKING:
    from bigdit.search.plan import Question

EXIT_DOES_NOT_FIT = 2
BESIDE_A_RUN = (
    *("gpu", "gpu_memory", "reserve", "gpus", "gpus_per_node", "network", "host_memory"),
    *("images", "price", "receipts", "explain"),
)
"""What is asked beside the YAML of a run, which says all else."""
MOST_OTHERS = 3
"""Other numbers of cards on a page: each is a plan, and some 150 of 1,000 KB."""


def run(
    config: Annotated[
        Path | None,
        typer.Option(help="A run's YAML, which says all but the GPUs and the data: a plan for each of its stages."),
    ] = None,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write run.yaml, plan.yaml and report.html to DIR.")
    ] = None,
    also_gpus: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Plan so many GPUs too, for report.html's what-if: three numbers at most."),
    ] = None,
    as_json: Json = False,
    **asked: Any,
) -> int:
    """Plan a training: whether it fits the GPUs, how fast it goes, what to set, and why.

    Exit status: 0 where it fits or is tight, 2 where it does not fit, 1 for what cannot be asked.
    """
    from bigdit.emulator.interpreter import cuda_python
    from bigdit.errors import UserError
    from bigdit.search.ask import question_for

    cuda_python()  # first, so that a missing one is said at once
    if config is None:
        if overrides:
            raise UserError("--set goes with --config, and --model was given; leave it out")
        question = question_for(**asked)
        others = [_with_gpus(number, asked) for number in _others(also_gpus, question.cluster.gpus, out)]
        return _plan(question, others, out, as_json)
    there = os.path.exists(config)  # or reading it says that it does not exist
    beside = {name: value for name, value in asked.items() if name not in BESIDE_A_RUN and value is not None}
    if there and beside:
        from bigdit.search.of_run import instead

        raise UserError(*(instead(name, value) for name, value in beside.items()))
    if also_gpus is not None:
        raise UserError("--also-gpus goes with --model, and --config was given; leave it out")
    return _plan_stages(config, overrides, {name: asked[name] for name in BESIDE_A_RUN}, out, as_json)


def _with_options(command: Callable[..., int]) -> None:
    """Give it an option for each field of a PlanRequest, before its own ones."""
    named = inspect.signature(command, eval_str=True).parameters.values()
    own = [each.replace(kind=each.KEYWORD_ONLY) for each in named if each.kind is not each.VAR_KEYWORD]
    gpu, *others = sorted(of_plans(), key=lambda each: each.name != "gpu")
    options = [gpu.replace(default=gpu.empty), *others, *own]
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]


_with_options(run)


def _others(also_gpus: str | None, own: int, out: Path | None) -> list[int]:
    """Cards in all of the plans that the page has beside its `own`."""
    from bigdit.errors import UserError
    from bigdit.strategy import MOST_GPUS

    if also_gpus is None:
        return []
    also = listed("--also-gpus", also_gpus, "numbers of cards such as 2,4,8", MOST_GPUS)
    if out is None:
        raise UserError("--also-gpus is for report.html, which --out DIR writes; add --out, or leave it out")
    if len(also) > MOST_OTHERS:
        raise UserError(
            f"--also-gpus {also_gpus[:40]} are {len(also)} numbers; a page has {MOST_OTHERS} beside its own"
        )
    if own in also:
        raise UserError(f"--also-gpus says {own}, which the plan is of; leave it out there")
    return also


def _with_gpus(number: int, asked: dict[str, Any]) -> Question:
    """The question of one of the other numbers, whose errors name the option that said it."""
    from bigdit.errors import UserError
    from bigdit.search.ask import question_for

    try:
        return question_for(**asked | {"gpus": number})
    except UserError as error:
        lines = (line.replace("--gpus is", "--also-gpus says") for line in error.problems)
        raise UserError(*(line.replace("or --gpus 1", "or leave it out") for line in lines)) from None


def _plan(question: Question, others: Sequence[Question], out: Path | None, as_json: bool) -> int:
    """The plan; and for its page those of other numbers of cards."""
    from bigdit import log
    from bigdit.report.plan import show
    from bigdit.search.answer import make_plan

    if out is not None:
        from bigdit.report.folder import check_folder, write_plan  # here: it draws, and imports what draws

        check_folder(out)
    plans = []
    for asked in (question, *others):
        on = f" on {asked.cluster.gpus} cards" if others else ""
        with log.status(f"planning the training of {asked.model.name}{on}") as status:
            plans.append(make_plan(asked, progress=status))
    plan = plans[0]
    if out is not None:
        log.notice(f"wrote {out}: {', '.join(file.name for file in write_plan(plan, out, plans[1:]))}")
    if as_json:
        log.emit_json(plan.model_dump(mode="json", exclude={"packed_timeline", "ran"}) | {"fits": plan.fits})
    else:
        show(plan, out)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _plan_stages(config: Path, overrides: list[str], asked: dict[str, Any], out: Path | None, as_json: bool) -> int:
    """A plan for each stage, in a folder of its own, and a run.yaml of all; the run fits where all do."""
    from bigdit import log
    from bigdit.report.plan import show_short
    from bigdit.search.answer import make_plan
    from bigdit.search.of_run import overruled, questions_of

    questions, plans = questions_of(config, overrides, asked), []
    folders = (
        [] if out is None else [out] if len(questions) == 1 else [out / f"stage-{n}" for n in range(len(questions))]
    )
    if out is not None:
        from bigdit.report.folder import check_folder, write_stages
        from bigdit.report.how_to_run import RUN

        for each in folders:
            check_folder(each)
    for line in overruled(config, overrides):
        log.notice(f"note: {line}")
    for number, question in enumerate(questions):
        name = f"stages.{number}" if len(questions) > 1 else str(config)
        with log.status(f"planning {name}") as status:
            plan = make_plan(question, progress=status)
        plans.append(plan)
        if not as_json:
            show_short(plan, name)
    if out is not None:
        write_stages(plans, out, folders, config, overrides)
        log.notice(f"to train with it: bigdit train --config {out / RUN}")
    fits = all(plan.fits for plan in plans)
    if as_json:
        found = [plan.model_dump(mode="json", exclude={"packed_timeline", "ran"}) for plan in plans]
        log.emit_json(
            {"fits": fits, "plans": [each | {"fits": plan.fits} for each, plan in zip(found, plans, strict=True)]}
        )
    return 0 if fits else EXIT_DOES_NOT_FIT
