"""Where checkpoints lie: `OUTPUT/checkpoints/step-00000800`, and a file `latest` beside them.

    engine/       rank-00000-of-00002.safetensors: the runs of masters, optimizer state and average that a process had
    state.json    step, lineage, model and its parameters' shapes, strategy, versions, and checksums: of each other file
                  and of itself

`latest` names the checkpoint that the run goes on from; it moves last. `snapshot.py` has what lies in the same way.
"""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import StringConstraints, ValidationError
from pydantic_core import PydanticUndefined

from bigdit.documents import read_json
from bigdit.errors import UserError
from bigdit.files import open_file, write_json
from bigdit.numbers import Natural, Switch
from bigdit.spec import ModelSpec, Strategy, Strict

LATEST = "latest"
STATE = "state.json"
ENGINE = "engine"
NAME = re.compile(r"step-[0-9]{8,}")
_CHECKSUM = "checksum"
_CHUNK = 1 << 22
_ZEROS = memoryview(bytes(_CHUNK))


class SavedState(Strict):
    """What the JSON of a folder of tensors says, but for its own checksum.

    `updates`: how many steps the averages have taken in, None without; `parameters`: their shapes; `checksums`: of each
    file, by its path in the folder.
    """

    step: Natural
    saved: str
    model: ModelSpec
    strategy: Strategy
    parameters: dict[str, list[Natural]]
    checksums: dict[Annotated[str, StringConstraints(pattern=rf"^{ENGINE}/[^/]+$")], str]
    updates: Natural | None


class CheckpointState(SavedState):
    """What state.json says. Keys with a default are those that earlier versions wrote nothing of."""

    lineage: list[Natural]
    local: Switch
    run: dict[str, Any]
    data: dict[str, Any] | None
    metrics: str | None = None
    updates: Natural | None = None
    snapshots: dict[Annotated[str, StringConstraints(pattern=rf"^{NAME.pattern}$")], str] = {}


@dataclass(frozen=True)
class Saved:
    """A whole folder of tensors by name on disk, and what the JSON in it says."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """How many optimizer steps were taken."""
        return int(self.state["step"])

    @property
    def engine(self) -> Path:
        """Files of the training state."""
        return self.folder / ENGINE

    def files(self) -> list[Path]:
        """Those that the JSON has checksums of."""
        return [self.folder / name for name in sorted(self.state["checksums"])]


@dataclass(frozen=True)
class Checkpoint(Saved):
    """A whole checkpoint on disk and what its state.json says."""

    @property
    def lineage(self) -> list[int]:
        """Steps of the checkpoints that this one came from, as far as they were there, and its own."""
        return list(map(int, self.state["lineage"]))

    @property
    def has_average(self) -> bool:
        """Whether a moving average of the weights was kept."""
        return self.state["strategy"].get("ema") is not None


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint's folder. Raises UserError where its state.json is missing or is not what was written."""
    kept, _ = read_state(folder, STATE, "a checkpoint", CheckpointState)
    if NAME.fullmatch(folder.name) and folder.name != name_of(kept["step"]):
        raise UserError(f"{folder} holds {name_of(kept['step'])}: it lies in the place of another")
    return Checkpoint(folder, kept)


def read_state(folder: Path, name: str, kind: str, expected: type[SavedState]) -> tuple[dict[str, Any], str]:
    """What `write_state` wrote under the keys that are `expected`, and its checksum. Raises UserError where it is
    missing or is not what was written."""
    file = folder / name
    try:
        state = read_json(file)
        if "checksums" in state and _CHECKSUM not in state:
            raise UserError(
                f"{file} has no checksum of its own: an earlier bigdit wrote it, whose checkpoints are not read"
            )
        known = state.pop(_CHECKSUM)
    except FileNotFoundError:
        raise UserError(f"{folder} is not {kind}: it holds no {name}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({str(error)[:200]})") from None
    if known != _digest(state):
        raise UserError(f"{file} is damaged: its checksum is not its own")
    kept = {key: state.get(key, field.default) for key, field in expected.model_fields.items()}
    try:
        expected.model_validate({key: value for key, value in kept.items() if value is not PydanticUndefined})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{file} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return kept, known


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def write_state(folder: Path, state: dict[str, Any], name: str = STATE) -> Path:
    """Write a JSON into the folder, with a checksum of what it says."""
    plain = json.loads(json.dumps(state, default=str))
    write_json(folder / name, plain | {_CHECKSUM: _digest(plain)})
    return folder / name


def checksum(file: Path) -> str:
    """xxh3-128 of a file's bytes, as hex."""
    digest = xxhash.xxh3_128()
    with open_file(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        while (at := opened.tell()) < size:
            data = _next_data(opened.fileno(), at, size)
            for start in range(at, data, len(_ZEROS)):
                digest.update(_ZEROS[: data - start])
            opened.seek(data)
            digest.update(opened.read(_CHUNK))
    return digest.hexdigest()


def _next_data(file: int, at: int, size: int) -> int:
    """Where a hole at this place ends: its zeros, most of a checkpoint of an emulated card, need not be read."""
    try:
        return os.lseek(file, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # to the end of the file
            return size
        raise


def _digest(state: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(state, sort_keys=True).encode()).hexdigest()
