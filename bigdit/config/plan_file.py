"""`plan.yaml`: what was asked, decided and expected, as training reads it back."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from bigdit.documents import parse_yaml, read_file
from bigdit.errors import UserError
from bigdit.files import write_text
from bigdit.spec import BatchShape, ModelSpec, StepSize, Strategy, Strict
from bigdit.spec.renamed import renamed

FORMAT = 1
FILE = "plan.yaml"
DS_CONFIG = "ds_config.json"

_HEAD = """\
# Written by `bigdit plan`, and run by `bigdit train --plan`: a record, whose digest an edit breaks.
# What is not said here (learning rate, schedule, steps, seed, data) is the run's own YAML's.
"""
_FIX = "ask `bigdit plan` again, with --out"


class Asked(Strict):
    """The question in short. `resolution` is (height, width) in pixels, `price` of one card for an hour."""

    gpu: str
    gpus: PositiveInt
    gpus_per_node: PositiveInt
    resolution: tuple[PositiveInt, PositiveInt]
    frames: PositiveInt | None
    global_batch_size: PositiveInt | None
    images: PositiveInt | None
    epochs: PositiveFloat
    price: PositiveFloat | None
    pins: dict[str, Any]


class Expected(Strict):
    """What the plan says of one card: bytes of memory; (low, high) where it is a range. `host_bytes` are a machine's,
    None where an earlier bigdit wrote it."""

    verdict: Literal["FITS", "TIGHT", "DOES NOT FIT"]
    usable_bytes: PositiveInt
    peak_allocated_bytes: PositiveInt
    peak_reserved_bytes: PositiveInt
    process_bytes: tuple[NonNegativeInt, NonNegativeInt]
    samples_per_second_per_card: tuple[NonNegativeFloat, NonNegativeFloat]
    host_bytes: NonNegativeInt | None = None

    _of_today = model_validator(mode="before")(renamed)


class LargestMicroBatch(Strict):
    """Of one size in pixels, as so many ran on an emulated GPU and one more did not: with nothing recomputed, with the
    plan's blocks, and with all. 0 where none fits, or swapped blocks have to be recomputed; None where it was not
    looked for."""

    height: PositiveInt
    width: PositiveInt
    none: NonNegativeInt | None
    recommended: NonNegativeInt
    full: NonNegativeInt | None


class Phase(Strict):
    """The peak of one phase in bytes, what it left, and what was live at the peak by category."""

    phase: str
    peak_bytes: NonNegativeInt
    end_bytes: NonNegativeInt
    at_peak: dict[str, NonNegativeInt]


class RecordedLedger(Strict):
    """`memory.Ledger` as a file has it: training compares with it, and recomputes nothing."""

    granularity: PositiveInt
    phases: tuple[Phase, ...]


class PlanFile(Strict):
    """A plan that can be run. `expandable_segments`: the setting of torch's allocator that it was planned for.

    `smaller`: what training goes on with where a step runs out of memory after all, one after the other.
    """

    format: Literal[1] = 1
    model: ModelSpec
    batch: BatchShape
    question: Asked
    strategy: Strategy
    expandable_segments: bool
    expected: Expected
    micro_batch_sizes: tuple[LargestMicroBatch, ...]
    smaller: tuple[StepSize, ...] = ()
    ledger: RecordedLedger
    versions: dict[str, str]
    catalogue: str

    @property
    def processes_per_node(self) -> list[int]:
        """Processes on each machine: as many on all where that comes out even, else the last machine has the rest."""
        world, most = self.strategy.world_size, self.question.gpus_per_node
        nodes = -(-world // most)
        if world % nodes == 0:
            return [world // nodes] * nodes
        return [most] * (nodes - 1) + [world - most * (nodes - 1)]

    @property
    def most_pixels(self) -> int:
        """Of the largest size that the plan found to fit its micro-batch."""
        height, width = self.question.resolution
        size = self.strategy.micro_batch_size
        fitting = [limit.height * limit.width for limit in self.micro_batch_sizes if limit.recommended >= size]
        return max([height * width, *fitting])


def write_plan_file(path: Path, plan: PlanFile) -> None:
    """Write `plan` with its digest. Raises UserError where it cannot be written."""
    document = plan.model_dump(mode="json")
    document = {"format": document.pop("format"), "digest": _digest(document | {"format": FORMAT}), **document}
    write_text(path, _HEAD + yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True))


def read_plan_file(path: Path, key: str = "--plan") -> PlanFile:
    """The plan in `path`, a plan.yaml or the folder of one, by which option or `key` it was asked for. Raises UserError
    unless it is as it was written."""
    file = plan_file(path)
    document = _read(file, key)
    if document.get("format") != FORMAT:
        raise UserError(f"{file} has format {document.get('format')!r}, and this bigdit reads {FORMAT}; {_FIX}")
    if document.pop("digest", "missing") != _digest(document):
        raise UserError(
            f"{file} is not as it was written: its digest does not match; a plan is a record, so put settings into "
            f"the run's YAML, or {_FIX}"
        )
    try:
        return PlanFile.model_validate(document)
    except ValidationError as error:
        first, *rest = error.errors()
        key = ".".join(str(part) for part in first["loc"])
        more = f" (and {len(rest)} more)" if rest else ""
        raise UserError(f"{file} was written by a bigdit of other keys: {key}: {first['msg']}{more}; {_FIX}") from None


def plan_file(path: Path) -> Path:
    """The plan.yaml that `--plan` means: the file, or the one in that folder."""
    return path / FILE if os.path.isdir(path) else path


def _read(file: Path, key: str) -> dict[str, Any]:
    try:
        document = parse_yaml(read_file(file, f"{key}: {file}", "; `bigdit plan --out DIR` writes one"))
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}; {_FIX}") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} is damaged: it holds no keys; {_FIX}")
    return document


def _digest(document: dict[str, Any]) -> str:
    """Sixteen hex digits of what the document says, however its lines are laid out; none for keys no JSON has."""
    try:
        plain = json.loads(json.dumps(document, default=str))  # all keys are text: they can be sorted
    except TypeError:
        return ""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
