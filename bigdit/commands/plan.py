"""`bigdit plan`: whether a training fits, how fast it is, which settings it needs, and why."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from bigdit import log
from bigdit.commands import EXIT_DOES_NOT_FIT, Json, Set, parse_numbers
from bigdit.errors import UserError
from bigdit.search.request import OPTIONS, option

if TYPE_CHECKING:
    from bigdit.search.plan import ResolvedRequest

WITH_CONFIG = [name for name, known in OPTIONS.items() if not (known["key"] or known["instead"])]
"""Options that are allowed with --config; run.yaml has keys for the others."""
MOST_OTHERS = 3
"""The most other numbers of GPUs on a page. Each is a plan, and adds about 150 KB to a page of 1,000 KB."""


def run(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan this run.yaml. What it sets is fixed; each stage gets a plan."),
    ] = None,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write run.yaml, plan.yaml and report.html to DIR.")
    ] = None,
    also_gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N,N", help="Also plan up to three other numbers of GPUs, for the sliders of report.html."
        ),
    ] = None,
    as_json: Json = False,
    **asked: Any,
) -> int:
    """Plan a training: whether it fits the GPUs, how fast it is, which settings it needs, and why.

    Exit status: 0 if it fits or is tight, 2 if it does not fit, 1 for invalid options.
    """
    from bigdit.emulator.interpreter import cuda_python
    from bigdit.search.resolve import resolve_request

    cuda_python()  # first: a missing one is an error at once
    if config is None:
        if overrides:
            raise UserError("--set needs --config, and --model was given; leave it out")
        request = resolve_request(**asked)
        others = [_with_gpus(number, asked) for number in _others(also_gpus, request.cluster.gpus, out)]
        return _plan(request, others, out, as_json)
    there = os.path.exists(config)  # else reading it raises the error
    extra = {name: value for name, value in asked.items() if name not in WITH_CONFIG and value is not None}
    if there and extra:
        from bigdit.search.of_run import instead

        raise UserError(*(instead(name, value) for name, value in extra.items()))
    if also_gpus is not None:
        raise UserError("--also-gpus needs --model, and --config was given; leave it out")
    return _plan_stages(config, overrides, {name: asked[name] for name in WITH_CONFIG}, out, as_json)


def _options() -> Iterator[inspect.Parameter]:
    """An option for each field of PlanRequest; --gpu, which is required, comes first."""
    for name in sorted(OPTIONS, key=lambda name: name != "gpu"):
        known = OPTIONS[name]
        kinds = get_args(known["type"])
        kind: Any = next((each for each in (Path, str, bool, float, int) if each in kinds), str)  # in this order
        flag = [option(name)] if kind is bool else []  # without a --no- form
        shown = typer.Option(*flag, metavar=known["metavar"], help=known["help"])
        given: Any = list[kind] if known["many"] else kind
        default = inspect.Parameter.empty if name == "gpu" else None
        annotation = Annotated[given | None, shown]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_own = [each for each in inspect.signature(run, eval_str=True).parameters.values() if each.name != "asked"]
run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_options(), *(each.replace(kind=each.KEYWORD_ONLY) for each in _own)]
)


def _others(also_gpus: str | None, own: int, out: Path | None) -> list[int]:
    """The numbers of GPUs of --also-gpus."""
    from bigdit.strategy import MOST_GPUS

    if also_gpus is None:
        return []
    also = parse_numbers("--also-gpus", also_gpus, "numbers of GPUs such as 2,4,8", MOST_GPUS)
    if out is None:
        raise UserError("--also-gpus needs --out DIR, which writes report.html; add --out, or leave it out")
    if len(also) > MOST_OTHERS:
        raise UserError(f"--also-gpus {also_gpus[:40]} has {len(also)} numbers; a page has at most {MOST_OTHERS}")
    if own in also:
        raise UserError(f"--also-gpus has {own}, the plan's own number of GPUs; leave it out there")
    return also


def _with_gpus(number: int, asked: dict[str, Any]) -> ResolvedRequest:
    """The request for another number of GPUs; its errors name --also-gpus."""
    from bigdit.search.resolve import resolve_request

    try:
        return resolve_request(**asked | {"gpus": number})
    except UserError as error:
        lines = (line.replace("--gpus is", "--also-gpus has") for line in error.problems)
        raise UserError(*(line.replace("or --gpus 1", "or leave it out") for line in lines)) from None


def _plan(request: ResolvedRequest, others: Sequence[ResolvedRequest], out: Path | None, as_json: bool) -> int:
    """Make the plan, and those for other numbers of GPUs on its page."""
    from bigdit.search.answer import make_plan

    if out is not None:
        from bigdit.report.page import check_folder, write_plan  # here: it imports matplotlib

        check_folder(out)
    plans = []
    for asked in (request, *others):
        on = f" on {asked.cluster.gpus} GPUs" if others else ""
        with log.status(f"planning the training of {asked.model.name}{on}") as status:
            plans.append(make_plan(asked, progress=status))
    plan = plans[0]
    if out is not None:
        log.notice(f"wrote {out}: {', '.join(file.name for file in write_plan(plan, out, plans[1:]))}")
    if as_json:
        log.emit_json(plan.model_dump(mode="json", exclude={"packed_timeline", "ran"}) | {"fits": plan.fits})
    else:
        from bigdit.report.plan import show

        show(plan, out)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _plan_stages(config: Path, overrides: list[str], asked: dict[str, Any], out: Path | None, as_json: bool) -> int:
    """Make a plan for each stage, and one run.yaml; the run fits if all stages fit."""
    from bigdit.report.plan import show_short
    from bigdit.search.answer import make_plan
    from bigdit.search.of_run import by_key, overruled, requests_of

    requests, plans = requests_of(config, overrides, asked), []
    folders = [] if out is None else [out] if len(requests) == 1 else [out / f"stage-{n}" for n in range(len(requests))]
    if out is not None:
        from bigdit.report.how_to_run import RUN
        from bigdit.report.page import check_folder, write_stages

        for each in folders:
            check_folder(each)
    for line in overruled(config, overrides):
        log.notice(f"note: {line}")
    for number, request in enumerate(requests):
        name = f"stages.{number}" if len(requests) > 1 else str(config)
        with log.status(f"planning {name}") as status:
            try:
                plan = make_plan(request, progress=status)
            except UserError as error:
                raise UserError(*(by_key(problem) for problem in error.problems)) from None
        plans.append(plan)
        if not as_json:
            show_short(plan, name)
    if out is not None:
        write_stages(plans, out, folders, config, overrides)
        log.notice(f"to train: bigdit train --config {out / RUN}")
    fits = all(plan.fits for plan in plans)
    if as_json:
        found = [plan.model_dump(mode="json", exclude={"packed_timeline", "ran"}) for plan in plans]
        log.emit_json(
            {"fits": fits, "plans": [each | {"fits": plan.fits} for each, plan in zip(found, plans, strict=True)]}
        )
    return 0 if fits else EXIT_DOES_NOT_FIT
