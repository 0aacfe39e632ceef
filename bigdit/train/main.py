"""What every launched process runs: read the config, check all of it, then train."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bigdit import log
from bigdit.config import load_run
from bigdit.dist import world_from_env
from bigdit.errors import guard
from bigdit.train.prepare import prepare, with_ds_config


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry of launch/train.py and `python -m bigdit.train`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="train.py", description="Train as the run's config says.")
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML")
    parser.add_argument("--ds-config", type=Path, help="DeepSpeed's JSON; chooses engine.name deepspeed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    # The deepspeed launcher passes it; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    return guard(lambda: _train(parsed.config, with_ds_config(parsed.set, parsed.ds_config)))


def _train(config: Path, overrides: Sequence[str]) -> None:
    world = world_from_env()
    run = load_run(config, overrides)
    spec, strategy = prepare(run, world.world_size)
    log.quiet_libraries()
    from bigdit.train.loop import train  # torch and the engines, only when the config is known to be good

    last = train(run, spec, strategy, world)
    if world.is_main:
        log.notice(f"wrote {last}")
