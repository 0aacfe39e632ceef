"""`bigdit train`: check the config, then start the right launcher."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit import log
from bigdit.commands import Config, Set
from bigdit.errors import UserError, shown
from bigdit.files import check_writable
from bigdit.processes import own_module
from bigdit.units import GIB, gib

if TYPE_CHECKING:
    from bigdit.config.stages import Stage
    from bigdit.train.prepare import Prepared
    from bigdit.train.processes.launch import Meeting


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
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Machines of the run. Run the same command on each.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="The number of this machine; the first is 0.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="The address of the first machine; port 29500 by default.")
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
    from bigdit.config.check import check_paths
    from bigdit.config.load import with_ds_config, with_grace
    from bigdit.config.stages import load_stages
    from bigdit.train.prepare import prepare_stages

    overrides = with_grace(with_ds_config(overrides, ds_config), grace)
    meeting = _meeting(nodes, node_rank, head, dry_run=dry_run)
    stages = load_stages(config, overrides)
    count = stages[0].strategy.world_size if dry_run else _processes_here(stages[0], nodes)
    check_paths(config, [stage.run for stage in stages])
    host_bytes = max((stage.plan.expected.host_bytes for stage in stages if stage.plan is not None), default=0)
    if not dry_run:
        _check_host(host_bytes)
    prepared = prepare_stages(stages, starting=not dry_run)
    if not dry_run:
        return _start(prepared[0], count, config, overrides, host_bytes, meeting)
    _show(prepared)
    return 0


def _meeting(nodes: int | None, node_rank: int | None, head: str | None, *, dry_run: bool) -> Meeting | None:
    """Where several machines connect; None for one machine. Raises UserError if an option is missing or wrong."""
    from bigdit.dist import PORT
    from bigdit.train.processes.launch import Meeting

    if (nodes or 1) == 1 or dry_run:
        if nodes is None and (node_rank is not None or head is not None):
            raise UserError("--node-rank and --head need --nodes, the number of machines")
        return None
    assert nodes is not None
    if node_rank is None or head is None:
        missing = "--node-rank, the number of this machine" if node_rank is None else "--head, the first one's address"
        raise UserError(f"--nodes {nodes} needs {missing}; each machine takes --nodes, --node-rank and --head")
    if node_rank >= nodes:
        raise UserError(f"--node-rank {node_rank} should be 0 to {nodes - 1} with --nodes {nodes}")
    host, colon, port = head.rpartition(":") if re.fullmatch(r"(\[.+\]|[^:]+):[^:]*", head) else (head, "", "")
    if colon and not (port.isdigit() and 0 < int(port) < 2**16):
        raise UserError(f"--head {shown(head)} should be HOST or HOST:PORT, with a port of 1 to 65535")
    return Meeting(host.strip("[]"), int(port) if colon else PORT, nodes, node_rank)


def _processes_here(first: Stage, nodes: int | None) -> int:
    """The processes of this machine: as many as planned for a machine, also if machines are missing. Raises UserError
    if the run does not divide into machines."""
    plan, count = first.plan, first.strategy.world_size
    if nodes is None and plan is not None and plan.machines > 1:
        raise UserError(
            f"the plan is for {count} processes on {plan.machines} machines; on each of them add --nodes "
            f"{plan.machines}, --node-rank (0 to {plan.machines - 1}) and --head, the address of the first"
        )
    machines = nodes or 1 if plan is None else max(nodes or 1, plan.machines)
    if count % machines:
        raise UserError(f"strategy.world_size is {count}, and --nodes {machines} does not divide it")
    return count // machines


def _start(
    first: Stage, count: int, config: Path, overrides: list[str], host_bytes: int, meeting: Meeting | None
) -> int:
    """Run `python -m bigdit.train` as this machine's `count` processes, and write the run's page on the first one."""
    from bigdit.documents import MOST_PROCESSES
    from bigdit.report import leaving_a_page
    from bigdit.train.processes.launch import Ranks

    if count > MOST_PROCESSES:
        raise UserError(
            f"strategy.world_size is {first.strategy.world_size}, and `bigdit train` starts at most {MOST_PROCESSES} "
            "processes on a machine; add --nodes"
        )
    arguments = ["--config", str(config), *(part for override in overrides for part in ("--set", override))]
    command = [sys.executable, *own_module("bigdit.train"), *arguments]
    is_main = meeting is None or meeting.node_rank == 0
    with leaving_a_page(first.run.output) if is_main else nullcontext():
        return Ranks(command, first.run.train.grace, host_bytes, meeting).run(count)


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
    from bigdit.models import rank_notices  # here: these import torch
    from bigdit.train.data import check_data
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
        for line in [*snapshot_notices(stage.run, model), *rank_notices(model)]:
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
