"""Checks a run's config before training, and finds its model. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bigdit import log
from bigdit.catalog.conditions import condition_problems
from bigdit.catalog.context import context_problems
from bigdit.catalog.families import block_count, objective_of, training_obstacle
from bigdit.catalog.resolve import model_spec, unfit_buckets
from bigdit.config.check import check, check_accelerate, check_store
from bigdit.config.plan_file import PlanFile, check_plan
from bigdit.config.run import RunConfig
from bigdit.config.stages import Stage, not_shared, of_each
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.objective_spec import learned, partial
from bigdit.strategy import ModelSpec, swap_misfit


@dataclass(frozen=True, kw_only=True)
class Prepared(Stage):
    """A checked stage, with its model."""

    spec: ModelSpec


def prepare_stages(stages: Sequence[Stage], *, starting: bool = False) -> list[Prepared]:
    """Each stage with its model; `starting`: also check that stores exist and the launcher's settings agree.

    Raises UserError with all problems.
    """

    def one(stage: Stage) -> Prepared:
        spec = prepare(stage.run, stage.plan)
        if starting:
            check_accelerate(stage.run.strategy)
            if stage.run.data.features is not None:
                check_store(stage.run.data)
        return Prepared(**vars(stage), spec=spec)

    found = of_each(stages, one)
    objectives = [learned(objective_of(each.spec, each.run.objective)) for each in found]
    problems = [
        not_shared(number, f"objective.{key}", own.get(key), objectives[0].get(key))
        for number, own in enumerate(objectives)
        for key in (objectives[0] | own if own["name"] == objectives[0]["name"] else ("name",))
        if own.get(key) != objectives[0].get(key)
    ]
    problems += [
        not_shared(each.number, "strategy.ds_config: zero_optimization.stage", own, found[0].strategy.zero_stage)
        for each in found
        if (own := each.strategy.zero_stage) != found[0].strategy.zero_stage
    ]
    if len(found) > 1 and any(each.strategy.features == "online" for each in found):
        problems.append("strategy.features is online, and the run has stages: it is of a run without stages")
    if problems:
        raise UserError(*problems)
    return found


def stage_at(stages: Sequence[Prepared], step: int) -> Prepared:
    """The stage of step number `step` (from 0); the last stage after all steps."""
    return next((each for each in stages if step < each.end), stages[-1])


def prepare(run: RunConfig, plan: PlanFile | None = None) -> ModelSpec:
    """The model of `run`, checked with the run and its `plan`. Raises UserError with all problems."""
    spec = model_spec(run.model)
    obstacle = training_obstacle(spec)
    if obstacle is not None:
        raise UserError(f"model {spec.name} cannot be trained: {obstacle} (`bigdit models` lists those that can)")
    if plan is not None:
        check_plan(run, spec, plan)
    check(run, spec)
    problems = condition_problems(run, spec) + [
        f"trackers has {name}, and its package is missing; pip install "
        + ("'bigdit[trackers]'" if name == "tensorboard" else name)
        for name in run.trackers
        if importlib.util.find_spec(name) is None
    ]
    swapped, blocks = run.strategy.blocks_to_swap, block_count(spec)
    if swapped and blocks is not None and (misfit := swap_misfit(swapped, blocks)) is not None:
        problems.append(misfit)
    problems += unfit_buckets(spec, run.encoders.image, run.data)
    if run.samples is not None and (why := partial(objective_of(spec, run.objective))) is not None:
        problems.append(f"samples: {why}; leave samples out")
    problems += context_problems(spec, run.strategy.cp, run.strategy.cp_ring)
    if (missing := run.strategy.optimizer.missing_package) is not None:
        problems.append(f"strategy.optimizer.name: {missing}")
    if problems:
        raise UserError(*problems)
    return spec


def log_lines(world: World, lines: Iterable[str], *, notes: bool = False) -> None:
    """Log lines on the main process alone; `notes`: each as a note."""
    for line in lines if world.is_main else ():
        log.notice(f"note: {line}" if notes else line)
