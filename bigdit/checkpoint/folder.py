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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bigdit.documents import read_json
from bigdit.errors import UserError
from bigdit.files import open_file, write_json

LATEST = "latest"
STATE = "state.json"
ENGINE = "engine"
NAME = re.compile(r"step-[0-9]{8,}")
_CHECKSUM = "checksum"
_CHUNK = 1 << 22
_ZEROS = memoryview(bytes(_CHUNK))
_KEYS = ("step", "lineage", "saved", "local", "model", "strategy", "run", "data", "parameters", "checksums")
_LATER: dict[str, Any] = {"metrics": None, "updates": None, "snapshots": {}}


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
    kept, _ = read_state(folder, STATE, "a checkpoint", _KEYS, _LATER)
    if NAME.fullmatch(folder.name) and folder.name != name_of(kept["step"]):
        raise UserError(f"{folder} holds {name_of(kept['step'])}: it lies in the place of another")
    return Checkpoint(folder, kept)


def read_state(
    folder: Path, name: str, kind: str, keys: Sequence[str], later: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """What `write_state` wrote under these `keys`, and its checksum; `later` are keys that earlier versions wrote
    nothing of, and what stands for them. Raises UserError where it is missing or is not what was written."""
    file = folder / name
    try:
        state = read_json(file)
        if "checksums" in state and _CHECKSUM not in state:
            raise UserError(
                f"{file} has no checksum of its own: an earlier bigdit wrote it, whose checkpoints are not read"
            )
        known = state.pop(_CHECKSUM)
        kept = {key: state[key] for key in keys} | {key: state.get(key, value) for key, value in later.items()}
    except FileNotFoundError:
        raise UserError(f"{folder} is not {kind}: it holds no {name}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({str(error)[:200]})") from None
    if known != _digest(state):
        raise UserError(f"{file} is damaged: its checksum is not its own")
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
