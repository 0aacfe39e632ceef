"""A run by a plan: the plan decides how it is stepped, the YAML what is trained on and how fast it learns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigdit.config.data import frames_of, written_bucket
from bigdit.config.deepspeed import complete_ds_config, ds_values, read_ds_config
from bigdit.config.keys import in_run
from bigdit.config.load import parse_run
from bigdit.config.plan_file import DS_CONFIG, PlanFile, plan_file
from bigdit.config.run import RunConfig
from bigdit.errors import UserError, versions
from bigdit.spec import PROFILES, EmaSpec, Strategy
from bigdit.units import gib, how_many

# Keys of a run that a plan decides, and the keys of its strategy. What is not here is the run's own.
_DECIDED = {
    "engine.name": "engine",
    "engine.reshard_after_forward": "reshard_after_forward",
    "engine.dp_replicate": "dp_replicate",
    "engine.cpu_offload": "cpu_offload",
    "optimizer.name": "optimizer.name",
    "optimizer.implementation": "optimizer.implementation",
    "train.micro_batch_size": "micro_batch_size",
    "train.grad_accum_steps": "grad_accum_steps",
    "train.precision": "precision",
    "train.optimizer_in_backward": "optimizer_in_backward",
    "train.checkpointed_blocks": "checkpointed_blocks",
    "train.checkpointing": "checkpointing",
    "train.offload_activations": "offload_activations",
    "train.blocks_to_swap": "blocks_to_swap",
    "data.read_ahead_steps": "read_ahead_steps",
}
# Of these the plan decides whether they are there, and these keys within, and how many averages there are; the rest (a
# decay, widths, alpha) is the run's.
_SECTIONS = {"ema": ("device",), "lora": ("rank", "targets", "base")}

COMPILED = (
    "train.compile_blocks is true, and the plan is of blocks as they are written: compiled ones keep other tensors, as "
    "a rule less, and at times more"
)
"""What is said of a run beside its plan."""


def planned_run(document: dict[str, Any], path: str, plan: PlanFile, source: Path) -> RunConfig:
    """The run in `document`, where it says nothing of what the plan in the folder or file `source` decides filled in.

    `path` names it in errors. Raises UserError with every value that contradicts the plan, by both keys, and with what
    `parse_run` finds.
    """
    wanted = _wanted(plan, document)
    for key, (value, _) in wanted.items():
        _fill(document, key.split("."), value)
    if (ema := plan.strategy.ema) is not None and not any(at(document, ["train", "ema", key]) for key in PROFILES):
        _fill(document, ["train", "ema", "widths"], ema.widths and list(ema.widths))
    _fill(document, ["train", "gradient_clipping"], plan.strategy.gradient_clipping)
    if plan.strategy.engine == "deepspeed":
        _fill(document, ["engine", "ds_config"], str(plan_file(source).parent / DS_CONFIG))
    if not any(at(document, ["model", way]) for way in ("name", "path", "class_name")):
        _fill(document, ["model", "class_name"], plan.model.class_name)
        _fill(document, ["model", "kwargs"], plan.model.kwargs)
    run = parse_run(document, path)
    problems = [*_contradictions(run, wanted, plan), *_ds_config_problems(run, plan.strategy)]
    if problems:
        raise UserError(*(f"{path}: {problem}" for problem in problems))
    return run


def planned_strategy(run: RunConfig, plan: PlanFile, world_size: int) -> Strategy:
    """The plan's strategy with the run's own constants, of the optimizer, the average, adapters and clipping, and with
    its blocks compiled where the run asks for it.

    Raises UserError where so many processes are not the plan's, or its features are not made as the run makes them.
    """
    planned, problems = plan.strategy, []
    if world_size != planned.world_size:
        problems.append(
            f"the plan is for {how_many(planned.world_size, 'process')} (strategy.world_size), and {world_size} "
            f"{'runs' if world_size == 1 else 'run'} (WORLD_SIZE, engine.processes); start {planned.world_size}, or "
            f"ask `bigdit plan` with --gpus {world_size}"
        )
    if (planned.features == "online") != run.data.online:
        asked = "online" if planned.features == "online" else "a folder"
        problems.append(
            f"the plan's strategy.features is {planned.features}, and data.features is {run.data.features}; set it to "
            f"{asked}, or ask `bigdit plan` with --features {'online' if run.data.online else 'cached'}"
        )
    if plan.expected.verdict == "DOES NOT FIT":
        problems.append(
            f"the plan's verdict is DOES NOT FIT: {gib(plan.expected.process_bytes[1])} wanted of "
            f"{gib(plan.expected.usable_bytes)} (expected); take one of the fixes in its report.html"
        )
    if problems:
        raise UserError(*problems)
    clipping = run.train.gradient_clipping
    ds_config = planned.ds_config and planned.ds_config | {"gradient_clipping": clipping or 0.0}
    own = {
        "optimizer": run.optimizer,
        "ema": run.train.ema,
        "lora": run.train.lora,
        "gradient_clipping": clipping,
        "compile_blocks": run.train.compile_blocks,
        "ds_config": ds_config,
    }
    try:
        return Strategy.model_validate(dict(planned) | own)
    except ValidationError as error:
        raise UserError(*in_run(detail["msg"].removeprefix("Value error, ") for detail in error.errors())) from None


def plan_notices(run: RunConfig, plan: PlanFile, catalogue: str) -> list[str]:
    """What of this run the plan did not foresee: other versions, another `catalogue`, larger samples; a line each."""
    lines, installed = [], versions() | {"python": plan.versions.get("python", "")}  # which takes no part in memory
    moved = [
        f"{name} {was} ({installed[name]} is installed)"
        for name, was in plan.versions.items()
        if name in installed and _release(installed[name]) != _release(was)
    ]
    if moved:
        lines.append(f"the plan was made with {', '.join(moved)}, which may take other memory; plan again to be sure")
    if plan.catalogue != catalogue:
        lines.append(
            f"the plan was made with catalogue {plan.catalogue}, and this is {catalogue}; plan again to be sure"
        )
    if run.train.compile_blocks:
        lines.append(COMPILED)
    height, width = plan.question.resolution
    frames = plan.question.frames or 1
    larger = [
        written_bucket(bucket)
        for bucket in run.data.buckets
        if math.prod(bucket[-2:]) * frames_of(bucket) > plan.most_pixels * frames
    ]
    planned = f"{height} × {width}" + (f" of {how_many(frames, 'frame')}" if plan.question.frames else "")
    if larger:
        lines.append(
            f"data.buckets holds {', '.join(larger)}, and the plan is for {planned} (question.resolution) and "
            "what fits as it does (micro_batch_sizes): larger samples take more memory than it says"
        )
    tokens, text = plan.batch.text and plan.batch.text[0], run.encoders.text
    asked = text and text.tokens_asked
    if tokens and (asked or 0) > tokens:
        lines.append(
            f"encoders.text.max_tokens is {asked}, and the plan is for {tokens} (batch.text): "
            "longer text takes more memory than it says"
        )
    return lines


def _release(version: str) -> str:
    """Without the build: the same torch for processors is as good as that for CUDA."""
    return version.partition("+")[0]


def _wanted(plan: PlanFile, document: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Keys of the run, the values that the plan gives them, and the keys of its strategy."""
    strategy = plan.strategy.model_dump(mode="json")
    wanted = {key: (at(strategy, of.split(".")), of) for key, of in _DECIDED.items()}
    for section, keys in _SECTIONS.items():
        if strategy[section] is None:
            wanted[f"train.{section}"] = (None, section)
        else:
            wanted |= {f"train.{section}.{key}": (strategy[section][key], f"{section}.{key}") for key in keys}
    if at(document, ["train", "global_batch_size"]) is not None:
        wanted["train.global_batch_size"] = (plan.strategy.global_batch_size, "global_batch_size")
        if at(document, ["train", "grad_accum_steps"]) is None:  # it follows, and both together are refused
            del wanted["train.grad_accum_steps"]
    wanted["engine.processes"] = (max(plan.processes_per_node), "world_size")
    return wanted


def _contradictions(run: RunConfig, wanted: dict[str, tuple[Any, str]], plan: PlanFile) -> Iterator[str]:
    document = run.model_dump(mode="json")
    for key, (value, of) in wanted.items():
        found = at(document, key.split("."))
        if found != value:
            yield _contradiction(key, found, of, value if of != "world_size" else _spread(plan))
    kept, wanted_averages = run.train.ema, plan.strategy.ema
    if (
        kept is not None and wanted_averages is not None and kept.count != wanted_averages.count
    ):  # 4 bytes a weight each
        yield _contradiction("train.ema", _averages(kept), "ema", _averages(wanted_averages))
    found, planned = run.train.gradient_clipping, plan.strategy.gradient_clipping
    if (found is None) != (planned is None):  # the norm takes memory, and its limit none: that is the run's
        yield _contradiction("train.gradient_clipping", found, "gradient_clipping", planned)


def _spread(plan: PlanFile) -> str:
    """`32 (8 on a machine)`."""
    on_each = plan.processes_per_node
    return f"{plan.strategy.world_size}" + (f" ({on_each[0]} on a machine)" if len(on_each) > 1 else "")


def _ds_config_problems(run: RunConfig, planned: Strategy) -> Iterator[str]:
    path = run.engine.ds_config
    if planned.ds_config is None or path is None:
        if path is not None or planned.ds_config is not None:
            engine = "engine deepspeed, with a ds_config" if path is None else f"engine {planned.engine}"
            yield f"engine.ds_config is {path or 'null'}, and the plan's strategy has {engine}; leave it out"
        return
    document, problems = complete_ds_config(read_ds_config(path), ds_values(planned, "the plan's strategy."))
    yield from (f"engine.ds_config {path}: {problem}" for problem in problems)
    if not problems:
        for key, found, wanted in differences(document, planned.ds_config, ""):
            yield _contradiction(f"engine.ds_config: in {path}, {key}", found, f"ds_config.{key}", wanted)


def _contradiction(key: str, found: Any, of: str, wanted: Any) -> str:
    return (
        f"{key} is {said(found)}, and the plan's strategy.{of} is {said(wanted)}; leave it out, or ask "
        "`bigdit plan` for it"
    )


def _averages(ema: EmaSpec) -> str:
    """`2 averages (ema.widths [0.05, 0.1])`: how many decides what they take, and the widths are the run's."""
    return f"{ema.count} average{'s' if ema.count > 1 else ''} ({ema.profile})"


def differences(found: Any, wanted: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """(key, found, wanted) of every value that two documents do not share."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() | wanted.keys()):
            yield from differences(found.get(name), wanted.get(name), f"{key}.{name}".removeprefix("."))
    elif found != wanted:
        yield key, found, wanted


def _fill(document: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Put `value` where the document says nothing; a value in the place of a section stays, to be complained of."""
    *parents, last = keys
    node: Any = document
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            return
    node.setdefault(last, value)


def at(document: Any, keys: Sequence[str]) -> Any:
    """The value at `keys`; None where there is none."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def said(value: Any) -> str:
    """A value as YAML would have it, without what a mapping says nothing of."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    return value if isinstance(value, str) else json.dumps(value)
