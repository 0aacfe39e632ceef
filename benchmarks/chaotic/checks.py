"""What must be true of a run's output after each disturbance, and when it has come through."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bigdit.checkpoint.folder import NAME, Checkpoint, checksum, open_checkpoint
from bigdit.checkpoint.shard_file import OFFSETS
from bigdit.errors import UserError
from bigdit.train.seen.metrics import read_metrics
from chaotic.processes import ChaosError, Door, none_left

STEPS = 10
"""Of every run."""


@dataclass(frozen=True)
class Course:
    """Of a run that nobody disturbed: what the files of the checkpoint of each step hold, rows, files of exports,
    file operations of its first process, seconds; and the output of one that was killed at step 8 of 10."""

    name: str
    held: dict[int, dict[str, str]]
    rows: list[tuple[Any, ...]]
    exports: dict[str, str]
    kept: list[int]
    operations: list[tuple[str, str]]
    seconds: float
    whole: Path
    half: Path


def checkpoints(output: Path) -> list[Checkpoint]:
    """All that are visible, by step. Raises UserError where one is damaged."""
    root = output / "checkpoints"
    found = sorted(folder for folder in root.glob("step-*") if NAME.fullmatch(folder.name)) if root.is_dir() else []
    return [open_checkpoint(folder) for folder in found]


def tensors_of(found: Checkpoint) -> dict[str, str]:
    """Digests of what a checkpoint's files hold. The files themselves differ: their headers have no fixed order."""
    digests = {}
    for file in found.files():
        content = file.read_bytes()
        data = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:data])
        offsets = json.loads(header.pop("__metadata__")[OFFSETS])
        for name, each in header.items():
            start, end = (data + offset for offset in each["data_offsets"])
            digest = xxhash.xxh3_128_hexdigest(content[start:end])
            digests[f"{file.name} {name}"] = f"{each['dtype']} {each['shape']} {offsets[name]} {digest}"
    return digests


def steps_of(output: Path) -> list[int]:
    """Of the visible checkpoints."""
    return sorted(int(folder.name[5:]) for folder in (output / "checkpoints").glob("step-*"))


def rows_of(output: Path) -> list[tuple[Any, ...]]:
    """What metrics.jsonl says of each step but its speed."""
    return [
        tuple(row.get(key) for key in ("step", "loss", "grad_norm", "lr"))
        for row in read_metrics(output / "metrics.jsonl")
    ]


def exports_of(output: Path) -> dict[str, str]:
    """Checksums of all files that were exported, by path."""
    root = output / "exports"
    files = [file for file in sorted(root.rglob("*")) if file.is_file() and ".tmp-" not in str(file.relative_to(root))]
    return {str(file.relative_to(root)): checksum(file) for file in files}


def check_safe(course: Course, output: Path, but: Sequence[int] = ()) -> int:
    """Every visible checkpoint (`but` some) and export is whole and right; the newest checkpoint's step, or 0."""
    right = []
    for step in steps_of(output):
        if step in but:
            continue
        try:
            found = open_checkpoint(output / "checkpoints" / f"step-{step:08d}")
            sums = {name: checksum(found.folder / name) for name in found.state["checksums"]}
        except (UserError, OSError) as error:
            raise ChaosError(f"a checkpoint is not whole: {error}") from None
        if sums != found.state["checksums"]:
            raise ChaosError(f"{found.folder.name} is damaged")
        if tensors_of(found) != course.held[step]:
            raise ChaosError(f"{found.folder.name} is not what an undisturbed run has")
        right.append(step)
    exports = exports_of(output)
    names = {name.split("/")[0] for name in exports}
    if exports != {name: digest for name, digest in course.exports.items() if name.split("/")[0] in names}:
        raise ChaosError(f"an export of {sorted(names)} is not what an undisturbed run has")
    return max(right, default=0)


def end_of(door: Door, within: float = 30.0) -> int:
    """Wait for a command; its status, when none of its processes is left, `within` seconds."""
    status = door.ends()
    none_left(within)
    return status


def end_well(door: Door, what: str = "the same command", within: float = 30.0) -> None:
    """Wait for a command that has nothing to complain of. Raises ChaosError, which says `what` it was, where it has."""
    status = end_of(door, within)
    check_said(door, refused=False)
    if status != 0:
        raise ChaosError(f"{what} ended with {status}: {door.text()[-2000:]}")


def end_when_full(door: Door) -> int:
    """The status of a command whose disk may have been full: done, or a line that says so."""
    status = end_of(door, within=15)
    check_said(door, refused=status != 0)
    if status not in (0, 1) or (status == 1 and "No space left on device" not in door.text()):
        raise ChaosError(f"ended with {status}: {door.text()[-2000:]}")
    return status


def check_whole(
    course: Course, output: Path, last: Door, *, rows: bool = True, kept: Sequence[int] | None = None
) -> None:
    """A run that has come through equals an undisturbed one to the bit, and nothing of its attempts is left.

    `last`: the command that came through. `kept`: the checkpoints that stay, if not the usual ones.
    """
    said = last.text().replace("\n", " ")
    done = "steps already" in said  # nothing was left to train, to measure and to save
    pointer = output / "checkpoints/latest"
    named = pointer.read_text() if pointer.exists() or not (done and "saved last" in said) else f"step-{STEPS:08d}\n"
    if check_safe(course, output) != STEPS or named != f"step-{STEPS:08d}\n":
        raise ChaosError(f"`latest` names {named!r} after {STEPS} steps")
    if rows and rows_of(output) != course.rows:
        raise ChaosError(f"the rows are {rows_of(output)} and not {course.rows}")
    if exports_of(output) != course.exports:
        raise ChaosError(f"exported are {sorted(exports_of(output))} and not {sorted(course.exports)}")
    if not (output / "receipt.json").exists() and not (done and "receipt.json is missing" in said):
        raise ChaosError("there is no receipt, and nothing was said of it")
    wanted, there = set(course.kept if kept is None else kept), set(steps_of(output))
    if not wanted <= there or (there != wanted and not done):  # one that was about to be pruned
        raise ChaosError(f"the checkpoints {sorted(there)} are there, and not {sorted(wanted)}")
    check_clean(output)


def check_clean(output: Path) -> None:
    """Nothing with a temporary name is left."""
    left = sorted(str(file.relative_to(output)) for file in output.rglob(".tmp-*"))
    if left:
        raise ChaosError(f"left behind: {left}")


def check_said(door: Door, refused: bool, most: int = 1) -> None:
    """No traceback, nothing called a bug; where it was `refused`, a line says why, or `most` lines do."""
    text = door.text()
    for sign in ("Traceback", "this is a bug", "Fatal Python error"):
        if sign in text:
            raise ChaosError(f"it said {sign!r}:\n{text[-3000:]}")
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if bool(errors) != refused or len(errors) > most:
        raise ChaosError(f"{len(errors)} lines say an error, and not {int(refused)}:\n{text[-3000:]}")
