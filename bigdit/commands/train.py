"""`bigdit train`: check the config, then start the right launcher."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit.commands.options import Config, Set

if TYPE_CHECKING:
    from bigdit.config.plan_file import PlanFile


def run(
    config: Config,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    ds_config: Annotated[Path | None, typer.Option(help="DeepSpeed's JSON; chooses the engine deepspeed.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A folder of `bigdit plan --out`; decides how the step is run.")
    ] = None,
    grace: Annotated[float | None, typer.Option(help="Seconds to save and end in after a signal; train.grace.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check config and model, print the config, stop.")] = False,
) -> int:
    """Train as the run's config says, with as many processes; the same command resumes."""
    from bigdit import libraries, log
    from bigdit.catalog.families import objective_of
    from bigdit.catalog.revision import revision
    from bigdit.config.plan_file import read_plan_file
    from bigdit.config.planned import plan_notices
    from bigdit.report.run.leave import leaving_a_page
    from bigdit.train.prepare import check_store, load, prepare, with_ds_config, with_grace
    from bigdit.train.processes.launch import launch

    overrides = with_grace(with_ds_config(overrides, ds_config), grace)
    planned = None if plan is None else read_plan_file(plan)
    run_config = load(config, overrides, planned, plan)
    if planned is not None:
        _check_one_machine(planned)
    spec, strategy = prepare(run_config, run_config.engine.processes, planned)
    if dry_run:
        for line in plan_notices(run_config, planned, revision()) if planned else ():
            log.notice(f"note: {line}")
        libraries.prepare()
        from bigdit.train.model import check_model  # torch, which only the processes that train need else
        from bigdit.train.saves import snapshots_said

        for line in snapshots_said(run_config, check_model(run_config, spec, strategy)):
            log.notice(f"note: {line}")
        resolved = run_config.model_copy(update={"objective": objective_of(spec, run_config.objective)})
        log.emit_json({"run": resolved.model_dump(mode="json"), "strategy": strategy.model_dump(mode="json")})
        return 0
    check_store(run_config)
    with leaving_a_page(run_config.output):
        return launch(run_config, config, overrides, plan)


def _check_one_machine(plan: PlanFile) -> None:
    from bigdit.errors import UserError

    spread = plan.processes_per_node
    if len(spread) > 1:
        raise UserError(
            f"the plan is for {plan.strategy.world_size} processes on {len(spread)} machines, and `bigdit train` "
            "starts those of one; start launch/train.py with the commands that `bigdit plan` printed"
        )
