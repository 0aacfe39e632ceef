"""`bigdit train`: check the config, then start the right launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit import log
from bigdit.commands import Config, Set
from bigdit.errors import UserError
from bigdit.files import check_writable
from bigdit.processes import entry, own_module
from bigdit.units import GIB, gib

if TYPE_CHECKING:
    from bigdit.config import Stage
    from bigdit.config.plan_file import PlanFile
    from bigdit.train.prepare import Prepared


def run(
    config: Config,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    ds_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="DeepSpeed's JSON configuration; it sets the engine to deepspeed."),
    ] = None,
    grace: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time to save and stop after a signal (train.grace).")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only check the config, the model and the cache, and print the config.",
        ),
    ] = False,
) -> int:
    """Train a run, with one process per GPU. Run it again to resume."""
    from bigdit.config import load_stages
    from bigdit.config.check import check_paths
    from bigdit.config.load import with_ds_config, with_grace
    from bigdit.train.prepare import prepare_stages

    overrides = with_grace(with_ds_config(overrides, ds_config), grace)
    stages = load_stages(config, overrides)
    for stage in stages:
        if stage.plan is not None:
            _check_one_machine(stage.plan)
    check_paths(config, [stage.run for stage in stages])
    host_bytes = max((stage.plan.expected.host_bytes for stage in stages if stage.plan is not None), default=0)
    if not dry_run:
        _check_host(host_bytes)
    prepared = prepare_stages(stages, starting=not dry_run)
    if not dry_run:
        return _start(prepared[0], config, overrides, host_bytes)
    _show(prepared)
    return 0


def _start(first: Stage, config: Path, overrides: list[str], host_bytes: int) -> int:
    """Run `python -m bigdit.train` as `strategy.world_size` processes, and write the run's page."""
    from bigdit.documents import MOST_PROCESSES
    from bigdit.report import leaving_a_page
    from bigdit.train.processes.launch import Ranks

    if (count := first.strategy.world_size) > MOST_PROCESSES:
        raise UserError(
            f"strategy.world_size is {count}, and `bigdit train` starts at most {MOST_PROCESSES} processes, on this "
            "machine; start the others by another launcher"
        )
    arguments = ["--config", str(config), *(part for override in overrides for part in ("--set", override))]
    command = [sys.executable, *own_module("bigdit.train"), *arguments]
    with leaving_a_page(first.run.output):
        return Ranks(command, first.run.train.grace, host_bytes).run(count)


def _show(prepared: list[Prepared]) -> None:
    """Check what needs torch too, and print the config and what a start would do."""
    from bigdit import libraries
    from bigdit.catalog.families import objective_of
    from bigdit.catalog.names import revision
    from bigdit.objective_spec import counting

    for stage in prepared:
        for line in stage.notices(revision()):
            log.notice(f"note: {line}")
    libraries.prepare()
    from bigdit.train.data import check_data  # here: it imports torch
    from bigdit.train.resume import start_notices, verdict, with_steps
    from bigdit.train.saves import snapshot_notices
    from bigdit.train.state import check_models

    models = check_models(prepared)
    missing = check_data(prepared)
    check_writable("output", prepared[0].run.output)
    prepared, lines = with_steps(prepared)
    for line in [*(f"note: {each}" for each in missing), *lines, *start_notices(prepared)]:
        log.notice(line)
    for stage, model in zip(prepared, models, strict=True):
        for line in snapshot_notices(stage.run, model):
            log.notice(f"note: {line}")
    documents = [
        stage.run.model_dump(mode="json")
        | {"objective": counting(objective_of(stage.spec, stage.run.objective))}  # only keys that have an effect
        for stage in prepared
    ]
    log.emit_json(documents[0] if len(documents) == 1 else {"stages": documents})
    log.notice(verdict(prepared))


def _check_host(needed: int) -> None:
    from bigdit.machine import memory_bytes

    if needed > (own := memory_bytes()):
        raise UserError(
            f"the plan needs {gib(needed)} of CPU memory (expected.host_bytes), and this machine has {gib(own)}; plan "
            f"with --host-memory {own // GIB}GiB"
        )


def _check_one_machine(plan: PlanFile) -> None:
    if plan.machines > 1:
        raise UserError(
            f"the plan is for {plan.strategy.world_size} processes on {plan.machines} machines, and `bigdit train` "
            f"starts one machine; start {entry()[-1]} with the commands that `bigdit plan` printed"
        )
