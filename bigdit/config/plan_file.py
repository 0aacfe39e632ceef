"""`plan.yaml`: what a plan predicts, and how a run deviates from it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from bigdit.config.data import frames_of, written_bucket
from bigdit.config.run import RunConfig
from bigdit.documents import differences, parse_yaml, read_file, written
from bigdit.errors import UserError, versions
from bigdit.files import write_text
from bigdit.strategy import BatchShape, ModelSpec, StepSize, Strategy, Strict
from bigdit.units import gib, how_many

FORMAT = 1
FILE = "plan.yaml"
DS_CONFIG = "ds_config.json"

_HEAD = """\
# Written by `bigdit plan`: predictions for the run.yaml in this folder. Do not edit: the digest would not match.
"""
_FIX = "run `bigdit plan` again, with --out"


class Asked(Strict):
    """A short form of the request; plan.json has all. `resolution`: (height, width) in pixels."""

    gpu: str
    gpus_per_node: PositiveInt
    resolution: tuple[PositiveInt, PositiveInt]
    frames: PositiveInt | None


class Expected(Strict):
    """Predicted bytes of one GPU, (low, high) for ranges. `host_bytes`: CPU memory of a machine."""

    verdict: Literal["FITS", "TIGHT", "DOES NOT FIT"]
    usable_bytes: PositiveInt
    peak_allocated_bytes: PositiveInt
    peak_reserved_bytes: PositiveInt
    process_bytes: tuple[NonNegativeInt, NonNegativeInt]
    samples_per_second_per_gpu: tuple[NonNegativeFloat, NonNegativeFloat]
    host_bytes: NonNegativeInt


class LargestMicroBatch(Strict):
    """The largest micro-batch for a size in pixels, found on an emulated GPU: with no recomputed blocks, with the
    plan's, and with all. 0 if none fits, or if swapped blocks must be recomputed; None if not searched."""

    height: PositiveInt
    width: PositiveInt
    none: NonNegativeInt | None
    recommended: NonNegativeInt
    full: NonNegativeInt | None


class Fewer(Strict):
    """The same run on one machine less: keys of its strategy that change, and predicted bytes of one GPU."""

    world_size: PositiveInt
    dp_replicate: PositiveInt
    micro_batch_size: PositiveInt
    grad_accum_steps: PositiveInt
    repeated_samples: NonNegativeInt
    global_batch_size: PositiveInt
    verdict: Literal["FITS", "TIGHT", "DOES NOT FIT"]
    process_bytes: tuple[NonNegativeInt, NonNegativeInt]

    def of(self, strategy: Strategy) -> Strategy:
        """The strategy on these GPUs."""
        return strategy.model_copy(update=self.model_dump(exclude={"global_batch_size", "verdict", "process_bytes"}))

    @property
    def needs(self) -> str:
        """Whether it fits, and the most bytes of one GPU."""
        return f"{self.verdict}, up to {gib(self.process_bytes[1])}"

    def __str__(self) -> str:
        repeated = f" with {how_many(self.repeated_samples, 'repeated sample')}" if self.repeated_samples else ""
        return (
            f"without one machine, the same command goes on with {self.world_size} GPUs and the same global batch of "
            f"{self.global_batch_size:,}: micro-batch {self.micro_batch_size} in "
            f"{how_many(self.grad_accum_steps, 'pass')}{repeated}; {self.needs}"
        )


class PlanFile(Strict):
    """What a plan predicts. `expandable_segments`: the planned setting of torch's allocator.

    `run_digest`: of the run.yaml that was written with it. `smaller`: sizes to try in order if a step runs out of
    memory. `without_machine`: None for one machine, or if the plan does not fit. `phases`: the peak of each phase, in
    bytes, with which training compares its own. `encoder_bytes`: the most that encoders have at one of these peaks.
    """

    format: Literal[1] = 1
    model: ModelSpec
    batch: BatchShape
    request: Asked
    strategy: Strategy
    expandable_segments: bool
    expected: Expected
    micro_batch_sizes: tuple[LargestMicroBatch, ...]
    smaller: tuple[StepSize, ...] = ()
    without_machine: Fewer | None = None
    phases: dict[str, NonNegativeInt]
    encoder_bytes: NonNegativeInt
    versions: dict[str, str]
    catalogue: str
    run_digest: str | None = None

    @property
    def machines(self) -> int:
        """The machines of the run, each with as many processes."""
        return -(-self.strategy.world_size // self.request.gpus_per_node)

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest size that fits with the plan's micro-batch."""
        height, width = self.request.resolution
        size = self.strategy.micro_batch_size
        fitting = [limit.height * limit.width for limit in self.micro_batch_sizes if limit.recommended >= size]
        return max([height * width, *fitting])


# Constants of a run that do not change predictions.
_FREE = ("lr", "betas", "beta3", "eps", "weight_decay", "decayed")


def unplanned(strategy: Strategy, plan: PlanFile) -> list[str]:
    """Keys of a run's strategy that a prediction depends on and that differ from the plan's, with both values."""
    return [
        f"strategy.{key} is {written(found)} (planned: {written(wanted)})"
        for key, found, wanted in differences(_predicted_by(strategy), _predicted_by(plan.strategy))
    ]


def _predicted_by(strategy: Strategy) -> dict[str, Any]:
    """The settings that predictions depend on: of EMA only device and count, of clipping only whether there is any."""
    found = strategy.model_dump(mode="json", exclude={"optimizer": set(_FREE), "lora": {"alpha"}})
    if strategy.ema is not None:
        found["ema"] = {"device": strategy.ema.device, "count": strategy.ema.count}
    return found | {"gradient_clipping": "a limit" if strategy.gradient_clipping else None}


def plan_notices(run: RunConfig, plan: PlanFile, catalogue: str) -> list[str]:
    """How a run deviates from its plan: strategy, versions, `catalogue`, larger samples; a line each."""
    lines, installed = [], versions() | {"python": plan.versions.get("python", "")}  # it does not change memory
    other, fewer = unplanned(run.strategy, plan), plan.without_machine
    if fewer is not None and not unplanned(run.strategy, plan.model_copy(update={"strategy": fewer.of(plan.strategy)})):
        lines.append(f"the plan for {fewer.world_size} GPUs: {fewer.needs}")
    elif other:
        lines.append(f"the plan is for another strategy, and is not compared with the run: {', '.join(other)}")
    moved = [
        f"{name} {was} ({installed[name]} is installed)"
        for name, was in plan.versions.items()
        if name in installed and _release(installed[name]) != _release(was)
    ]
    if moved:
        lines.append(f"the plan was made with {', '.join(moved)}, which may change its memory; plan again to be sure")
    if plan.catalogue != catalogue:
        lines.append(
            f"the plan was made with catalogue {plan.catalogue}, and this is {catalogue}; plan again to be sure"
        )
    return [*lines, *_larger(run, plan)]


def _larger(run: RunConfig, plan: PlanFile) -> list[str]:
    """Samples that need more memory than the plan's, a line for each kind."""
    lines, (height, width), frames = [], plan.request.resolution, plan.request.frames or 1
    larger = [
        written_bucket(bucket)
        for bucket in run.data.all_buckets
        if math.prod(bucket[-2:]) * frames_of(bucket) > plan.most_pixels * frames
    ]
    planned = f"{height} × {width}" + (f" of {how_many(frames, 'frame')}" if plan.request.frames else "")
    if larger:
        lines.append(
            f"data.buckets has {', '.join(larger)}, and the plan is for {planned} (request.resolution) and sizes that "
            "fit as well (micro_batch_sizes): larger samples need more memory than planned"
        )
    tokens, text = plan.batch.text and plan.batch.text[0], run.encoders.text
    asked = text and text.tokens_asked
    if tokens and (asked or 0) > tokens:
        lines.append(
            f"encoders.text.max_tokens is {asked}, and the plan is for {tokens} (batch.text): "
            "longer text needs more memory than planned"
        )
    return lines


def check_plan(run: RunConfig, spec: ModelSpec, plan: PlanFile) -> None:
    """Raise UserError if the plan is for another model than `spec`, or predicts that the run does not fit."""
    if plan.expected.verdict == "DOES NOT FIT" and not unplanned(run.strategy, plan):
        raise UserError(
            f"the plan's verdict is DOES NOT FIT: {gib(plan.expected.process_bytes[1])} needed of "
            f"{gib(plan.expected.usable_bytes)} (expected); take one of the fixes in its report.html"
        )
    planned = plan.model
    if spec.class_name != planned.class_name:
        raise UserError(
            f"model is a {spec.class_name}, and the plan's model is {planned.name}, a {planned.class_name}; set plan "
            "to null, or plan this model"
        )
    # As JSON has it: a config.json's lists are a constructor's tuples. What only one of them names may be a default.
    own, wanted = (ModelSpec.model_validate_json(each.model_dump_json()).kwargs for each in (spec, planned))
    problems = [
        f"model has {key} {own[key]!r}, and the plan's model.kwargs.{key} is {wanted[key]!r} ({planned.name}); set "
        "plan to null, or plan this model"
        for key in sorted(own.keys() & wanted.keys())
        if own[key] != wanted[key]
    ]
    if problems:
        raise UserError(*problems)


def _release(version: str) -> str:
    """The version without the build: CPU and CUDA builds of one torch are equivalent here."""
    return version.partition("+")[0]


def write_plan_file(path: Path, plan: PlanFile) -> None:
    """Write `plan` with its digest. Raises UserError if it cannot be written."""
    document = plan.model_dump(mode="json")
    document = {"format": document.pop("format"), "digest": _digest(document | {"format": FORMAT}), **document}
    write_text(path, _HEAD + yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True))


def read_plan_file(path: Path) -> PlanFile:
    """The plan in `path`, a plan.yaml or its folder. Raises UserError if it was changed or damaged."""
    file = path / FILE if os.path.isdir(path) else path
    document = _read(file)
    if document.get("format") != FORMAT:
        raise UserError(f"{file} has format {document.get('format')!r}, and this bigdit reads {FORMAT}; {_FIX}")
    if document.pop("digest", "missing") != _digest(document):
        raise UserError(
            f"{file} was changed: its digest does not match; put settings into the run.yaml in its folder, or {_FIX}"
        )
    try:
        return PlanFile.model_validate(document)
    except ValidationError as error:
        first, *rest = error.errors()
        key = ".".join(str(part) for part in first["loc"])
        more = f" (and {len(rest)} more)" if rest else ""
        raise UserError(
            f"{file} was written by another version of bigdit: {key}: {first['msg']}{more}; {_FIX}"
        ) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        document = parse_yaml(
            read_file(file, f"plan: {file}", "; set plan to null, or to one that `bigdit plan` wrote")
        )
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}; {_FIX}") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} is damaged: it holds no keys; {_FIX}")
    return document


def _digest(document: dict[str, Any]) -> str:
    """Sixteen hex digits of the document's values; empty for keys that JSON cannot have."""
    try:
        plain = json.loads(json.dumps(document, default=str))  # makes all keys text, which can be sorted
    except TypeError:
        return ""
    return text_digest(json.dumps(plain, sort_keys=True))


def text_digest(text: str) -> str:
    """Sixteen hex digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
