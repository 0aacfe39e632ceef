"""`bigdit train`: check the config, then start the right launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigdit.commands.options import Config, Set


def run(
    config: Config,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    ds_config: Annotated[Path | None, typer.Option(help="DeepSpeed's JSON; chooses the engine deepspeed.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
) -> int:
    """Train as the run's config says, with as many processes; the same command resumes."""
    from bigdit import log
    from bigdit.config import load_run
    from bigdit.train.launch import launch
    from bigdit.train.prepare import prepare, with_ds_config

    overrides = with_ds_config(overrides, ds_config)
    run_config = load_run(config, overrides)
    _, strategy = prepare(run_config, run_config.engine.processes)
    if dry_run:
        log.emit_json({"run": run_config.model_dump(mode="json"), "strategy": strategy.model_dump(mode="json")})
        return 0
    return launch(run_config.engine, config, overrides)
