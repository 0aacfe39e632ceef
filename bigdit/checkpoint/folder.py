"""The layout of checkpoints: `OUTPUT/checkpoints/step-00000800`, and a file `latest` next to them.

    engine/       rank-00000-of-00002.safetensors: one process's slices of masters, optimizer state and EMA
    state.json    step, lineage, model and its parameters' shapes, strategy, versions, and checksums of all files

`latest` names the checkpoint that the run resumes from; it is written last.

Snapshots of a run's EMAs are in `OUTPUT/ema_snapshots/step-00000800`, in the same layout:

    engine/          rank-00000-of-00002.safetensors: one process's slices of EMAs
    snapshot.json    step, number of EMA updates, model, strategy, shapes, checksums

A checkpoint names the earlier snapshots of its run, each with the checksum of its snapshot.json.
"""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import torch.distributed as dist
import xxhash
from pydantic import StringConstraints, ValidationError
from pydantic_core import PydanticUndefined
from safetensors import SafetensorError, safe_open

from bigdit.config.run import CHECKPOINTS, EMA_SNAPSHOTS
from bigdit.dist import World
from bigdit.documents import Natural, Switch, read_json
from bigdit.errors import UserError
from bigdit.files import open_file, read_bytes, write_json
from bigdit.strategy import ModelSpec, Strategy, Strict

LATEST = "latest"
STATE = "state.json"
ENGINE = "engine"
NAME = re.compile(r"step-[0-9]{8,}")
_CHECKSUM = "checksum"
_CHUNK = 1 << 22
_ZEROS = memoryview(bytes(_CHUNK))

T = TypeVar("T")
ALONE = World()


class SavedState(Strict):
    """The JSON of a folder of tensors, without its own checksum.

    `updates`: the number of EMA updates, None without EMA; `parameters`: their shapes; `checksums`: by path in the
    folder.
    """

    step: Natural
    saved: str
    model: ModelSpec
    strategy: Strategy
    parameters: dict[str, list[Natural]]
    checksums: dict[Annotated[str, StringConstraints(pattern=rf"^{ENGINE}/[^/]+$")], str]
    updates: Natural | None


class CheckpointState(SavedState):
    """The content of state.json. Keys with a default may be missing."""

    lineage: list[Natural]
    local: Switch
    run: dict[str, Any]
    data: dict[str, Any] | None
    metrics: str | None = None
    updates: Natural | None = None
    snapshots: dict[Annotated[str, StringConstraints(pattern=rf"^{NAME.pattern}$")], str] = {}


@dataclass(frozen=True)
class Saved:
    """A complete folder of tensors by name on disk, and its JSON."""

    folder: Path
    state: dict[str, Any]
    kind: ClassVar[str] = ""
    document: ClassVar[str] = ""
    """The name of its JSON."""

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return int(self.state["step"])

    @property
    def engine(self) -> Path:
        """The folder of safetensors files."""
        return self.folder / ENGINE

    def files(self) -> list[Path]:
        """The files whose checksums the JSON holds."""
        return [self.folder / name for name in sorted(self.state["checksums"])]


@dataclass(frozen=True)
class Checkpoint(Saved):
    """A complete checkpoint on disk, and its state.json."""

    kind = "checkpoint"
    document = STATE

    @property
    def lineage(self) -> list[int]:
        """The steps of the checkpoints that it descends from and that existed, and its own step."""
        return list(map(int, self.state["lineage"]))

    @property
    def has_ema(self) -> bool:
        """Whether it holds an EMA of the weights."""
        return self.state["strategy"].get("ema") is not None


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint's folder. Raises UserError if its state.json is missing or was changed."""
    kept, _ = read_state(folder, STATE, "a checkpoint", CheckpointState)
    if NAME.fullmatch(folder.name) and folder.name != name_of(kept["step"]):
        raise UserError(f"{folder} holds {name_of(kept['step'])}: its folder has the name of another")
    return Checkpoint(folder, kept)


def read_state(folder: Path, name: str, kind: str, expected: type[SavedState]) -> tuple[dict[str, Any], str]:
    """The `expected` keys of what `write_state` wrote, and its checksum. Raises UserError if it is missing or was
    changed."""
    file = folder / name
    try:
        state = read_json(file)
        known = state.pop(_CHECKSUM)
    except FileNotFoundError:
        raise UserError(f"{folder} is not {kind}: it holds no {name}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({str(error)[:200]})") from None
    if known != _digest(state):
        raise UserError(f"{file} is damaged: its checksum does not match its content")
    kept = {key: state.get(key, field.default) for key, field in expected.model_fields.items()}
    try:
        expected.model_validate({key: value for key, value in kept.items() if value is not PydanticUndefined})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{file} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return kept, known


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def write_state(folder: Path, state: dict[str, Any], name: str = STATE) -> Path:
    """Write a JSON into the folder, with a checksum of its content; returns its path."""
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
    """The end of a hole in the file. Its zeros, most of an emulated GPU's checkpoint, need not be read."""
    try:
        return os.lseek(file, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # the hole ends with the file
            return size
        raise


def _digest(state: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(state, sort_keys=True).encode()).hexdigest()


SNAPSHOT = "snapshot.json"


@dataclass(frozen=True)
class Snapshot(Saved):
    """A complete snapshot on disk; `digest`: the checksum of its snapshot.json."""

    digest: str
    kind = "snapshot"
    document = SNAPSHOT


def write_snapshot(folder: Path, state: dict[str, Any]) -> Path:
    """Write snapshot.json, with a checksum of its content."""
    return write_state(folder, {key: state[key] for key in SavedState.model_fields}, SNAPSHOT)


def open_snapshot(folder: Path) -> Snapshot:
    """A snapshot's folder. Raises UserError if its snapshot.json is missing or was changed."""
    return Snapshot(folder, *read_state(folder, SNAPSHOT, "a snapshot of the EMA", SavedState))


def snapshots_of(checkpoint: Checkpoint) -> list[Snapshot]:
    """The existing snapshots that the checkpoint's run made before it, the oldest first.

    Raises UserError if one of them was replaced by another run's.
    """
    root, found = checkpoint.folder.absolute().parents[1] / EMA_SNAPSHOTS, []
    for name, digest in sorted(checkpoint.state["snapshots"].items()):
        if not (root / name).is_dir():
            continue
        found.append(open_snapshot(root / name))
        if found[-1].digest != digest:
            raise UserError(
                f"{root / name} is not the snapshot that {checkpoint.folder} was trained with, but another run's, or "
                "of another course of this one; remove it, and EMAs are made without it"
            )
    return sorted(found, key=lambda each: each.step)


def latest(output: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that a run resumes from, or None before the first; and notices about the choice.

    It is the one that `latest` names; if that file cannot be read, the complete one that was saved last. Raises
    UserError if `latest` names one that is damaged.
    """
    root = output / CHECKPOINTS
    name, why = _named(root / LATEST)
    if name is not None:
        try:
            return open_checkpoint(root / name), []
        except UserError as error:
            raise UserError(f"{error}; {advice(root, name)}") from None
    others = whole(root)
    if not others:
        return None, [f"{why}, and no checkpoint in {root} is whole"] if any(root.glob("step-*")) else []
    found = newest(others)
    return found, [f"{why}; {found.folder.name} was saved last"]


def find_checkpoint(path: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint in a folder, or the latest of a run's output, with notices. Raises UserError if there is none."""
    if (path / STATE).is_file():
        return open_checkpoint(path), []
    found, notices = latest(path)
    if found is None:
        run = next((each for each in list(path.parents)[:3] if (each / CHECKPOINTS).is_dir()), None)
        fix = "" if run is None else f"; name {run}, or one of {run / CHECKPOINTS}"
        raise UserError(
            *notices, f"--checkpoint {path}: neither a checkpoint nor the output of a run that saved one{fix}"
        )
    return found, notices


def whole(root: Path) -> list[Checkpoint]:
    """The checkpoints in `root` whose state.json is intact and whose files exist."""
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if not NAME.fullmatch(folder.name):
            continue
        try:
            each = open_checkpoint(folder)
        except UserError:
            continue
        if all(file.is_file() for file in each.files()):
            found.append(each)
    return found


def newest(found: list[Checkpoint]) -> Checkpoint:
    """The checkpoint that was saved last."""
    return max(found, key=lambda each: (each.state["saved"], each.step))


def advice(root: Path, damaged: str) -> str:
    """Advice for a person whose checkpoint `damaged` is damaged."""
    others = [found for found in whole(root) if found.folder.name != damaged]
    if not others:
        return "there is no other; choose another output to start again"
    return f"to resume from the one before, write {newest(others).folder.name} into {root / LATEST}"


def _named(pointer: Path) -> tuple[str | None, str]:
    """The name in `latest`; or None, and the reason."""
    try:
        text = read_bytes(pointer).decode().strip()
    except FileNotFoundError:
        return None, f"{pointer} is missing"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{pointer} cannot be read ({error})"
    if NAME.fullmatch(text):
        return text, ""
    return None, f"{pointer} holds {text[:40]!r}, which is no checkpoint's name"


class Peers:
    """All processes of `world`, in a process group of their own, so that training's collectives continue meanwhile.

    All processes make one at the same place, after training's own group.
    """

    def __init__(self, world: World = ALONE) -> None:
        self.world = world
        self.group = dist.new_group(backend="gloo") if world.world_size > 1 else None

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank; all call this."""
        if self.group is None:
            return [value]
        found: list[T] = [value] * self.world.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, problem: str | None) -> None:
        """Raise UserError with the first problem, on all processes; all call this."""
        for each in self.gather(problem):
            if each is not None:
                raise UserError(each)


def verify(found: Saved, peers: Peers | None = None, *, by_content: bool = True) -> None:
    """Raise UserError if a file is missing, changed or does not belong there. Without `by_content`, only headers and
    sizes of files are read.

    With `peers` all processes call it, each reads some of the files, and all raise the same problem.
    """
    peers = Peers() if peers is None else peers
    more = set(found.engine.glob("*.safetensors")) - set(found.files())
    problems = []
    if more:
        problems.append(f"{min(more)} is not part of its {found.kind}: {found.document} does not name it; remove it")
    for file in found.files()[peers.world.rank :: peers.world.world_size]:
        problems += _problem(found, file, by_content)
    peers.agree(problems[0] if problems else None)


def _problem(found: Saved, file: Path, by_content: bool) -> list[str]:
    name = str(file.relative_to(found.folder))
    why = ""
    try:
        if not by_content and file.is_file():
            with safe_open(file, "pt"):  # it compares the size of the file with those of its tensors
                return []
        if by_content and file.is_file() and checksum(file) == found.state["checksums"][name]:
            return []
    except SafetensorError:
        pass
    except OSError as error:
        why = str(error)
    fix = "remove the snapshot, and EMAs are made without it"
    if isinstance(found, Checkpoint):
        fix = advice(found.folder.parent, found.folder.name)
    if not file.is_file():
        return [f"the {found.kind} {found.folder} lacks {name}; {fix}"]
    return [f"{file} is damaged: {why or f'its checksum differs from that in {found.document}'}; {fix}"]


CHECKSUMS = "checksums.json"
_AGAIN = "copy it again, or run `bigdit export` again"


def write_checksums(folder: Path) -> None:
    """Write the xxh3-128 of each file in the folder. Raises UserError if that fails."""
    write_json(folder / CHECKSUMS, {file.name: checksum(file) for file in sorted(folder.iterdir())})


def check_exported(folder: Path, *, by_content: bool = True) -> None:
    """Raise UserError if a file of an exported folder is missing, changed (`by_content`) or does not belong there.

    A folder without checksums, from other software, is not checked.
    """
    if folder.is_file():
        return
    file = folder / CHECKSUMS
    try:
        sums: dict[str, str] = read_json(file)
        more = {each.name for each in folder.glob("*.safetensors")} - sums.keys()
        lacking = [name for name in sums if not (folder / name).is_file()]
        whole = [(name, known) for name, known in sums.items() if name not in lacking and by_content]
        changed = [name for name, known in whole if checksum(folder / name) != known]
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged or cannot be read ({error}); {_AGAIN}") from None
    if lacking:
        raise UserError(f"{folder} lacks {lacking[0]}, which its {CHECKSUMS} names; {_AGAIN}")
    if changed:
        raise UserError(f"{folder / changed[0]} is damaged: its checksum differs from that in {CHECKSUMS}; {_AGAIN}")
    if more:
        raise UserError(f"{folder / min(more)} is not part of its export: {CHECKSUMS} does not name it; remove it")
