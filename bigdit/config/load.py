"""Read YAML, apply `--set a.b=c`, validate; every problem is one line that names its key.

A run may have stages, one after another with the same weights. Each is a run with some keys of its own. A Strategy by
itself is text such as `zero2,world_size=8,checkpointed_blocks=all`, or a YAML file of its keys.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from bigdit.config.plan_file import PlanFile, plan_notices, read_plan_file
from bigdit.config.run import RunConfig
from bigdit.config.wrong import meant_within, shown, wrong
from bigdit.dist import processes_here
from bigdit.documents import at, differences, parse_json, parse_yaml, read_mapping, written
from bigdit.errors import UserError, nearest
from bigdit.strategy import Strategy
from bigdit.units import how_many

_BEGIN = "`bigdit init` writes a run.yaml for a model, a GPU and a folder of images"


def read_run(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The document in `path` with its overrides, not yet validated. Raises UserError where it is no mapping."""
    if path.suffix.lower() == ".toml":
        raise UserError(f"the config {path} is TOML, as other trainers have it; {_BEGIN}")
    document = read_mapping(
        path, parse_yaml, f"the config {path}", "a mapping of sections such as model, data and train"
    )
    for override in overrides:
        _apply(document, override)
    return document


def parse_run(document: dict[str, Any], source: str = "", world_size: int | None = None) -> RunConfig:
    """Validate a document; `source` names it in errors. `world_size`: the number of processes that a launcher started.
    Raises UserError with all problems."""
    known = document.keys() & RunConfig.model_fields.keys()
    try:
        document = _with_strategy(document, world_size)
        return RunConfig.model_validate(document)
    except ValidationError as error:
        problems = wrong(error, document, RunConfig)
        if not known:  # of another trainer
            sections = ", ".join(name for name, field in RunConfig.model_fields.items() if field.is_required())
            problems = [f"it has none of {sections}; {_BEGIN}", *meant_within(document)]
    except UserError as error:
        problems = list(error.problems)
    raise UserError(*(f"{source}: {line}" if source else line for line in problems))


def read_ds_config(path: Path, key: str = "strategy.ds_config") -> dict[str, Any]:
    """DeepSpeed's document, which `key` names. Raises UserError where it is missing or no JSON object."""
    return read_mapping(path, parse_json, f"{key}: {path}", "a JSON object")


def set_once(overrides: Sequence[str]) -> list[str]:
    """The values of `--set`, with `images[0].` as `images.0.`. Raises UserError for a repeated key."""
    dotted = [re.sub(r"^[^=]*", lambda key: re.sub(r"\[(\d+)\]", r".\1", key[0]), each) for each in overrides]
    keys = [override.partition("=")[0] for override in dotted]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise UserError(*(f"--set has {key[:80]} {keys.count(key)} times; give it once" for key in twice))
    return dotted


def with_option(overrides: Sequence[str], option: str, values: Mapping[str, object]) -> list[str]:
    """The overrides, with the keys of an option. Raises UserError for a key that `--set` has too."""
    keys = [override.partition("=")[0] for override in overrides]
    if both := [key for key in values if key in keys]:
        raise UserError(*(f"{option} and --set {key} set the same key; leave one of them out" for key in both))
    return [*(f"{key}={value}" for key, value in values.items()), *overrides]


def with_ds_config(overrides: Sequence[str], ds_config: Path | None) -> list[str]:
    """`--ds-config FILE` as overrides."""
    if ds_config is None:
        return list(overrides)
    return with_option(overrides, "--ds-config", {"strategy.engine": "deepspeed", "strategy.ds_config": ds_config})


def with_grace(overrides: Sequence[str], grace: float | None) -> list[str]:
    """`--grace SECONDS` as an override."""
    return list(overrides) if grace is None else with_option(overrides, "--grace", {"train.grace": grace})


def _with_strategy(document: dict[str, Any], world_size: int | None) -> dict[str, Any]:
    """The document with `world_size` and the contents of the DeepSpeed file that its strategy names."""
    strategy = document.get("strategy", {})
    if not isinstance(strategy, dict):
        return document
    if isinstance(path := strategy.get("ds_config"), str):
        strategy = strategy | {"ds_config": read_ds_config(Path(path))}
    if world_size is not None:
        strategy = {"world_size": world_size} | strategy
        if strategy["world_size"] != world_size:
            strategy = _without_machines(strategy, world_size)
    return document | {"strategy": strategy}


def _without_machines(strategy: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The strategy on fewer machines than planned, with the same global batch, and in HSDP fewer copies of the model.

    Micro-batches are no larger than the passes need. Raises UserError unless whole machines are missing.
    """
    here = processes_here()
    try:
        asked = Strategy.model_validate(strategy)
    except ValidationError:  # the run's own checks report it
        return strategy
    if here is None or world_size > asked.world_size or world_size % here or asked.world_size % here:
        raise UserError(other_processes(asked.world_size, world_size))
    if asked.dp_replicate > 1 and world_size % asked.dp_shard:
        raise UserError(
            f"strategy.dp_replicate is {asked.dp_replicate}, so {asked.dp_shard} GPUs hold a copy of the model, and "
            f"{world_size} of {asked.world_size} are there; start a multiple of {asked.dp_shard}"
        )
    return {key: value for key, value in strategy.items() if key != "global_batch_size"} | asked.over(world_size)


def other_processes(asked: object, world_size: int) -> str:
    """The error of a launcher that started another number of processes than the run needs."""
    return (
        f"strategy.world_size is {asked}, and {how_many(world_size, 'process')} "
        f"{'runs' if world_size == 1 else 'run'} (WORLD_SIZE); start that many, set it to {world_size}, or leave it out"
    )


def _apply(document: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found or not key:
        raise UserError(f"--set expects key.path=value, such as train.steps=100, and {override[:80]!r} was found")
    *parents, last = key.split(".")
    node: Any = document
    for number, parent in enumerate(parents):
        if parents[:number][-1:] == ["data"] and parent == "images" and [*parents, last][number + 1].isdecimal():
            _list_sources(node)
        node = _within(node, parent, override)
        if not isinstance(node, dict | list):
            fix = f"; write {override[:80].replace('.images.', '.images[0].')}" if parent == "images" else ""
            raise UserError(f"--set {override[:80]}: {parent} is a value, and has no keys{fix}")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"--set {override[:80]}: the value is {error}") from None
    if isinstance(node, list):
        _within(node, last, override)
        node[int(last)] = value
    else:
        node[last] = value


def _list_sources(data: dict[str, Any]) -> None:
    """Replace `images: FOLDER` by `images: [{path: FOLDER}]`, which has a number and keys."""
    found = data.get("images", [])
    sources = found if isinstance(found, list) else [found]
    data["images"] = [{"path": each} if isinstance(each, str) else each for each in sources]


def _within(node: Any, key: str, override: str) -> Any:
    """The value at a key of a mapping, a new section if it is missing; or at a number of a list."""
    if isinstance(node, dict):
        return node.setdefault(key, {})
    if not key.isdecimal() or int(key) >= len(node):
        raise UserError(f"--set {override[:80]}: {key[:20]} is no number of a list of {len(node)}, from 0 on")
    return node[int(key)]


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


MOST_MICRO_BATCH = 1024
"""The largest micro-batch that may be requested; the search ends at 512."""

_HOST = {"device": "cpu", "pin_memory": True}
# Buckets of 5e7 elements: DeepSpeed's own 5e8 cost up to 1.9 GiB, and models here are a few blocks of 1e7.
_ZERO = {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
PRESETS: dict[str, dict[str, Any]] = {
    "single": {"engine": "single"},
    "ddp": {"engine": "ddp"},
    **{
        f"zero{stage}": {"engine": "deepspeed", "ds_config": {"zero_optimization": {"stage": stage, **_ZERO}}}
        for stage in range(4)
    },
    **{
        f"zero{stage}-offload": {
            "engine": "deepspeed",
            "ds_config": {"zero_optimization": {"stage": stage, **_ZERO, "offload_optimizer": _HOST}},
        }
        for stage in (2, 3)
    },
    "zero3-offload-all": {
        "engine": "deepspeed",
        "ds_config": {"zero_optimization": {"stage": 3, **_ZERO, "offload_optimizer": _HOST, "offload_param": _HOST}},
    },
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-offload": {"engine": "fsdp2", "cpu_offload": True},
}
"""Engines by their usual names; keys of a Strategy may be added to them."""


def parse_strategy(texts: Sequence[str]) -> Strategy:
    """The Strategy of presets, `key=value` pairs (dots descend) and YAML files, later ones over earlier ones. Keys are
    those of `Strategy`; `ds_config` is a file or a document. Raises UserError with all problems."""
    document: dict[str, Any] = {}
    for text in texts:
        parts = _split(text)
        _check_once(parts)
        for part in parts:
            _add(document, part)
    if isinstance(document.get("ds_config"), str):
        document["ds_config"] = read_ds_config(Path(document["ds_config"]))
    if document.get("engine") == "deepspeed":
        document.setdefault("ds_config", {})
    try:
        strategy = Strategy.model_validate(document)
    except ValidationError as error:
        raise UserError(*(f"--strategy: {line}" for line in wrong(error, document, Strategy))) from None
    return _within_bounds(strategy)


def _split(text: str) -> list[str]:
    """Parts at commas that are not within brackets."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _check_once(parts: Sequence[str]) -> None:
    """Raise UserError for a repeated key."""
    seen: dict[str, str] = {}
    for part in parts:
        key, found, _ = (each.strip() for each in part.partition("="))
        if found and key in seen:
            raise UserError(f"--strategy has {seen[key]} and {part}; leave one of them out")
        seen[key] = part


def _add(document: dict[str, Any], part: str) -> None:
    key, found, text = part.partition("=")
    if found:
        *parents, last = key.strip().split(".")
        node = document
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise UserError(f"--strategy {part}: {parent} is a value, and has no keys")
        node[last] = _yaml(text, part)
    elif part in PRESETS:
        document.update(_copied(PRESETS[part]))
    elif part.endswith((".yaml", ".yml", ".json")):
        path = Path(part)
        document.update(
            read_mapping(path, parse_yaml, f"--strategy {path}: the file", "a mapping of keys such as engine")
        )
    else:
        raise UserError(f"--strategy {part}: neither key=value, a YAML file nor a preset; {nearest(part, PRESETS)}")


def _yaml(text: str, part: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"--strategy {part[:80]}: the value is {error}") from None


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def _within_bounds(strategy: Strategy) -> Strategy:
    """The strategy. Raises UserError for a micro-batch that plans reject too."""
    size, most = strategy.micro_batch_size, MOST_MICRO_BATCH
    if size > most:
        raise UserError(f"--strategy: micro_batch_size is {size}, and {most} or less was expected")
    return strategy
