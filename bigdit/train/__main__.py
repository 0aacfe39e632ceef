"""`python -m bigdit.train`: each process of a run. It reads the config, checks it, and trains.

Everything else is imported in functions: so `guard` handles Ctrl-C during imports.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from bigdit.errors import guard, shown
from bigdit.train.processes.end import end_with_launcher, leave, restart_all

EXPANDABLE = "expandable_segments:True"

Around = Callable[[Path], AbstractContextManager[object]]
"""Surrounds a training, and gets its output. It makes the run's page: `report` is a higher layer."""


def main(arguments: Sequence[str] | None = None, around: Around = nullcontext) -> int:
    """Train, and return the exit status. The main process trains within `around`. Raises UserError."""
    parsed = parse(arguments)
    end_with_launcher()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch prints stack frames when a process is lost
    from bigdit import libraries, log
    from bigdit.catalog.names import revision
    from bigdit.config.load import set_once, with_ds_config, with_grace
    from bigdit.config.stages import load_stages
    from bigdit.dist import world_from_env
    from bigdit.train.prepare import log_lines, prepare_stages

    world = world_from_env()
    overrides = with_grace(with_ds_config(set_once(parsed.set), parsed.ds_config), parsed.grace)
    stages = prepare_stages(load_stages(parsed.config, overrides, world.world_size), starting=True)
    for stage in stages:
        log_lines(world, stage.notices(revision()), notes=True)
    if any(stage.plan is not None and stage.plan.expandable_segments for stage in stages):
        log_lines(world, _set_allocator(), notes=True)
    libraries.prepare()
    with libraries.importing():  # torch and the engines, only when the config is known to be good
        from bigdit.train.loop import train
        from bigdit.train.processes.stop import Stop, Stopped
        from bigdit.train.resume import with_steps
        from bigdit.train.state import check_models

        check_models(stages)

    stages, lines = with_steps(stages)
    log_lines(world, lines)
    run = stages[0].run
    stop = Stop(run.train.grace, world)
    try:
        with around(run.output) if world.is_main else nullcontext(), stop.listening():
            ended = train(stages, world, stop)
        if ended.following is not None and stop.signum:
            raise Stopped(stop.signum, ended.step, ended.checkpoint)
    except Stopped as stopped:
        if world.is_main:
            log.notice(str(stopped))
        stop.end_after_main()
        return stopped.status
    if ended.trained:
        log_lines(world, [f"wrote {ended.checkpoint}"])
    if ended.following is not None:
        done, following = (stages[ended.following - before].name for before in (1, 0))
        log_lines(world, [f"{done} is done; the processes restart for {following}"])
        restart_all(ended.store, world)
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of launch/train.py. Exits if they are wrong."""
    parser = argparse.ArgumentParser(description="Train as the run's config says.")
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML")
    parser.add_argument("--ds-config", type=Path, help="DeepSpeed's JSON; chooses strategy.engine deepspeed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--grace", type=float, help="seconds to save and end after a signal; overrides train.grace")
    # The deepspeed launcher passes it; the environment has it too.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _set_allocator() -> list[str]:
    """Set torch's allocator as the plan assumes, before the first allocation. A user's own setting stays: returns a
    line if it differs."""
    own = next((name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in os.environ), None)
    if own is None:
        os.environ["PYTORCH_ALLOC_CONF"] = EXPANDABLE
    elif EXPANDABLE.lower() not in os.environ[own].lower():
        return [
            f"{own} is {shown(os.environ[own])}, and the plan is for {EXPANDABLE}: without it torch may "
            f"reserve more than planned; unset {own}, or add that to it"
        ]
    return []


if __name__ == "__main__":
    leave(guard(main))
