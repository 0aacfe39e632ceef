"""The stages of a run, one after another with the same weights. Each is a run with some keys of its own.

A run without stages is one stage.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bigdit.config.load import other_processes, parse_run, read_run
from bigdit.config.plan_file import PlanFile, plan_notices, read_plan_file
from bigdit.config.run import RunConfig
from bigdit.config.wrong import shown
from bigdit.documents import at, differences, written
from bigdit.errors import UserError
from bigdit.strategy import Strategy
from bigdit.units import how_many

A = TypeVar("A")


T = TypeVar("T")


S = TypeVar("S", bound="Stage")


# Keys that all stages share: weights and their copies, inputs of the model, processes.
_SHARED = (
    *("model", "output", "trackers", "data.classes", "data.references"),
    *("data.min_references", "data.fill"),
    *("encoders.image.name", "encoders.image.class_name", "encoders.image.path", "encoders.image.config"),
    *("encoders.text.pipeline", "encoders.text.files", "encoders.text.class_name", "encoders.text.path"),
    *("encoders.text.config", "encoders.text.seed", "encoders.first_frame", "train.seed"),
    *(f"strategy.{key}" for key in ("engine", "world_size", "cp", "cp_ring", "dp_replicate", "precision", "ema")),
    *("strategy.lora", "strategy.controlnet", "strategy.features"),
    *("strategy.optimizer.name", "strategy.optimizer.decayed"),
)


@dataclass(frozen=True)
class Stage:
    """Stage `number` of `count`, from 0: a `run` that begins at step `start`. A run without stages is one stage.

    `plan`: its predictions, if it has a plan. `length`: the key of its length. `asked`: world_size in its YAML.
    """

    run: RunConfig
    number: int = 0
    count: int = 1
    start: int = 0
    plan: PlanFile | None = None
    length: str = "train.steps"
    asked: int | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy of its steps."""
        return self.run.strategy

    @property
    def end(self) -> int:
        """The number of steps at its end, with those of earlier stages."""
        return self.start + self.run.train.known_steps

    @property
    def name(self) -> str:
        """`stages.1`, as in the YAML."""
        return f"stages.{self.number}"

    @property
    def prefix(self) -> str:
        """The prefix of its keys: `stages.1.`; empty for a run without stages."""
        return f"{self.name}." if self.count > 1 else ""

    def notices(self, catalogue: str) -> list[str]:
        """Notes on differences from its plan, fewer machines, and repeated samples."""
        found = [*self._dealt(), *([] if self.plan is None else plan_notices(self.run, self.plan, catalogue))]
        return [f"{self.name}: {line}" if self.count > 1 else line for line in found]

    def _dealt(self) -> Iterator[str]:
        strategy = self.strategy
        gpus, whole, places = how_many(strategy.world_size, "GPU"), strategy.global_batch_size, strategy.places
        if self.asked not in (None, strategy.world_size):
            copies = f" and {strategy.dp_replicate} copies of the model" if strategy.dp_replicate > 1 else ""
            yield (
                f"{strategy.world_size} of {self.asked} GPUs: the global batch stays {whole}, with micro_batch_size "
                f"{strategy.micro_batch_size}, grad_accum_steps {strategy.grad_accum_steps}{copies}"
            )
        if repeated := strategy.repeated_samples:
            yield (
                f"a global batch of {whole} over {gpus} takes {places} places: {how_many(repeated, 'sample')} "
                f"{'is' if repeated == 1 else 'are'} repeated with weight 0 ({100 * repeated / places:.0f} % of "
                "the time)"
            )


def load_run(path: Path, overrides: Sequence[str] = (), stage: int | None = None) -> RunConfig:
    """The run in `path` with `key.path=value` overrides; `stage`: which of its stages. Raises UserError with all
    problems."""
    found = load_chosen(path, overrides, stage)
    if len(found) > 1:
        raise UserError(f"{path} has {len(found)} stages; choose one: --stage 0 to {len(found) - 1}")
    return found[0].run


def load_chosen(path: Path, overrides: Sequence[str], stage: int | None) -> tuple[Stage, ...]:
    """All stages of the run in `path`, or this one. Raises UserError with all problems."""
    stages = load_stages(path, overrides)
    if stage is None:
        return stages
    if stage >= len(stages):
        found = f"stages 0 to {len(stages) - 1}" if len(stages) > 1 else "no stages"
        raise UserError(f"--stage is {stage}, and {path} has {found}")
    return stages[stage : stage + 1]


def load_stages(path: Path, overrides: Sequence[str] = (), world_size: int | None = None) -> tuple[Stage, ...]:
    """The stages of the run in `path`, in order. `world_size`: the number of processes that a launcher started. Raises
    UserError with all problems."""
    document, asked = _read(path, overrides)

    def stage(number: int) -> Stage:
        if asked and "stages" in asked[number]:
            raise UserError("stages: unknown key")
        whole = _merged(document, asked[number]) if asked else document
        run = parse_run(whole, "", world_size)
        plan = None if run.plan is None else read_plan_file(path.parent / run.plan)
        processes = at(whole, ["strategy", "world_size"])
        if processes not in (None, run.strategy.world_size) and plan and plan.machines == 1:
            raise UserError(other_processes(processes, run.strategy.world_size))
        return Stage(run, number, len(asked) or 1, plan=plan, asked=processes)

    try:
        if asked:
            return _sharing(of_each(range(len(asked)), stage, "stages.{}."))
        return (stage(0),)
    except UserError as error:
        raise UserError(*(with_set(f"{path}: {line}", path, overrides, asked) for line in error.problems)) from None


def with_set(problem: str, path: Path, overrides: Sequence[str], asked: Sequence[dict[str, Any]] = ()) -> str:
    """The problem, with `--set` after the file's name if an override sets the key; `asked`: the stages' own keys."""
    detail = problem.removeprefix(f"{path}: ")
    key = re.sub(r"^(stages\.\d+): ", r"\1.", detail).partition(" ")[0].rstrip(":")
    if problem.startswith(f"{path}: ") and any(_sets(each.partition("=")[0], key, asked) for each in overrides):
        return f"{path} with --set: {detail}"
    return problem


def _sets(override: str, key: str, asked: Sequence[dict[str, Any]]) -> bool:
    """Whether an override sets the key or a section around it, also for a stage that inherits it, or for all stages."""
    of_stage = re.fullmatch(r"stages\.(\d+)\.(.+)", key)
    if of_stage is not None:
        inner = of_stage[2]
        keys = [key] if at(asked[int(of_stage[1])], inner.split(".")) is not None else [key, inner]
    else:
        keys = [key, *(f"stages.{n}.{key}" for n, own in enumerate(asked) if at(own, key.split(".")) is not None)]
    return any(f"{each}.".startswith(f"{override}.") for each in keys)


def read_stages(path: Path, overrides: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The document of each stage, merged with the run's and not validated; and the stages' own keys. Raises UserError
    where stages are no list of mappings."""
    document, asked = _read(path, overrides)
    return [_merged(document, own) for own in asked] or [document], asked


def of_each(stages: Sequence[A], action: Callable[[A], T], before: str = "stages.{}: ", first: int = 0) -> list[T]:
    """The results of `action` for these stages, from number `first` on. Raises UserError with all problems: those that
    all stages share once, others after their stage."""
    found, problems = [], []
    for number, stage in enumerate(stages, first):
        try:
            found.append(action(stage))
        except UserError as error:
            problems.append((number, error.problems))
    if not problems:
        return found
    in_all = set.intersection(*(set(own) for _, own in problems)) if len(problems) == len(stages) else set()
    lines = [line if line in in_all else before.format(number) + line for number, own in problems for line in own]
    raise UserError(*dict.fromkeys(lines))


def in_order(stages: Sequence[S]) -> tuple[S, ...]:
    """The stages with their first steps, which are unknown after a stage whose epochs were not counted yet."""
    placed, start = [], 0
    for stage in stages:
        placed.append(replace(stage, start=start))
        start += stage.run.train.steps or 0
    return tuple(placed)


def not_shared(number: int, key: str, found: Any, first: Any) -> str:
    """The error for a key that differs between a stage and the first one."""
    return (
        f"stages.{number}.{key} is {written(found)}, and stages.0 has {written(first)}: all stages share it; set it "
        "once, outside stages"
    )


def _read(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    document = read_run(path, overrides)
    asked = document.pop("stages", None) or []
    if not isinstance(asked, list) or not all(isinstance(own, dict) for own in asked):
        raise UserError(f"{path}: stages is {shown(asked)}, and a list of mappings of a run's keys was expected")
    if unused := [each for each in overrides if asked and all(_has_own(own, each) for own in asked)]:
        raise UserError(*(_unused(each, len(asked)) for each in unused))
    return document, asked


def _has_own(own: Any, override: str) -> bool:
    """Whether a stage has its own value for the override's key."""
    for part in override.partition("=")[0].split("."):
        if not isinstance(own, dict):
            return True
        if part not in own:
            return False
        own = own[part]
    return not isinstance(own, dict)


def _unused(override: str, stages: int) -> str:
    key, _, value = override.partition("=")
    return (
        f"--set {override[:80]}: all {stages} stages have their own {key}; set it for one, such as "
        f"stages.0.{key}={value[:40]}"
    )


def _sharing(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages in order. Raises UserError if shared keys differ."""
    if problems := [line for stage in stages for line in _not_shared(stage, stages[0])]:
        raise UserError(*problems)
    return in_order(stages)


def _merged(base: Any, own: Any) -> Any:
    """The run's sections with a stage's keys; lists are replaced as a whole."""
    if not isinstance(base, dict) or not isinstance(own, dict):
        return copy.deepcopy(own)
    return copy.deepcopy(base) | {key: _merged(base.get(key), value) for key, value in own.items()}


def _not_shared(stage: Stage, first: Stage) -> Iterator[str]:
    own, firsts = (each.run.model_dump(mode="json") for each in (stage, first))
    for key in _SHARED:
        here, there = (at(document, key.split(".")) for document in (own, firsts))
        for inner, found, wanted in differences(here, there, key):
            yield not_shared(stage.number, inner, found, wanted)
