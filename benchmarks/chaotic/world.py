"""What a lane of rounds disturbs: pictures, a config, and what comes of them when nobody disturbs anything."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import yaml
from PIL import Image

from bigdit.checkpoint.folder import NAME, Checkpoint, checksum, open_checkpoint
from bigdit.checkpoint.shard_file import OFFSETS
from bigdit.errors import UserError
from bigdit.train.metrics import read_metrics
from chaotic import moments
from chaotic.processes import ChaosError, Door, none_left, send

ROOT = Path(__file__).parents[2]
PICTURES, PART_SIZE = 40, 4
STEPS = 10
TRAINED = {"steps": STEPS, "checkpoint_every": 2, "keep_checkpoints": 2, "keep_every": 4, "export_every": 4}
_MODEL = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "num_cross_attention_heads": 4}
_MODEL |= {"cross_attention_head_dim": 8, "cross_attention_dim": 32}

_FIRST_S = 400.0  # DeepSpeed compiles its collectives at the first start on a machine

COURSES = {
    "single": {"engine": {"name": "single"}},
    "fsdp2": {"engine": {"name": "fsdp2", "processes": 2}, "train": {"precision": "fp32"}},
    "fp32": {"engine": {"name": "single"}, "train": {"precision": "fp32"}},
    "zero2": {
        "engine": {"name": "deepspeed", "processes": 2, "ds_config": str(ROOT / "ds_configs/zero2_bf16.json")},
    },
}
"""Runs by their engines: what differs in their configs."""


class World:
    """A lane's folder, in which everything lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictures = folder / "pictures"
        self.pictures.mkdir(parents=True)
        noise = np.random.default_rng(0)
        for number in range(PICTURES):
            pixels = noise.integers(0, 256, (16, 24 if number % 3 else 16), dtype=np.uint8)
            Image.fromarray(pixels).save(self.pictures / f"{number:02d}.png")
            (self.pictures / f"{number:02d}.txt").write_text(f"noise number {number % 7}")
        (self.pictures / "07.png").write_bytes(b"no picture")

    def config(self, name: str) -> Path:
        """The YAML of a course."""
        path = self.folder / f"{name}.yaml"
        if not path.exists():
            path.write_text(yaml.safe_dump(_document(self.pictures, COURSES[name]), sort_keys=False))
        return path

    @functools.cached_property
    def store(self) -> Store:
        """The features, and what was done to make them."""
        root, said = self.folder / "features", self.folder / "extract.said"
        watched = moments.Moment(root, said)
        door = Door(self.extracting(root), self.folder / "extract.log", watched)
        began = time.perf_counter()
        _must_end(door, 0)
        seconds = time.perf_counter() - began
        most: dict[int, int] = {}
        for pid, _, _ in moments.said(said):
            most[pid] = most.get(pid, 0) + 1
        files = {file.name: file.read_bytes() for file in root.glob("*.safetensors")}
        return Store(root, files, max(most.values()), seconds)

    def extracting(self, root: Path) -> list[object]:
        """The arguments of an extraction into `root`."""
        return ["extract", "--config", self.config("single"), "--set", f"data.features={root}"]

    def training(self, course: str, output: Path, *overrides: str, store: Path | None = None) -> list[object]:
        """The arguments of a training to `output`."""
        chosen = [f"output={output}", f"data.features={store or self.store.root}", *overrides]
        return ["train", "--config", self.config(course), *(word for each in chosen for word in ("--set", each))]

    def course(self, name: str) -> Course:
        """What comes of a run that nobody disturbs."""
        return _course(self, name)


@dataclass(frozen=True)
class Store:
    """A whole store, its files' bytes, the most file operations of one process that made it, its seconds."""

    root: Path
    files: dict[str, bytes]
    operations: int
    seconds: float

    @property
    def parts(self) -> dict[str, bytes]:
        """Those of samples."""
        return {name: content for name, content in self.files.items() if name.startswith("part-")}


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


@functools.cache
def _course(world: World, name: str) -> Course:
    folder = world.folder / f"course-{name}"
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
    folder.mkdir()
    every, whole, half = folder / "every", folder / "whole", folder / "half"
    _must_end(
        Door(
            world.training(name, every, "train.keep_checkpoints=99", "train.checkpoint_every=1"), folder / "every.log"
        ),
        0,
    )
    said = folder / "whole.said"
    began = time.perf_counter()
    _must_end(Door(world.training(name, whole), folder / "whole.log", moments.Moment(whole, said)), 0)
    seconds = time.perf_counter() - began
    operations = [(event, path) for _, event, path in moments.said(said)]
    held = {found.step: tensors_of(found) for found in checkpoints(every)}
    course = Course(name, held, rows_of(whole), exports_of(whole), steps_of(whole), operations, seconds, whole, half)
    if rows_of(every) != course.rows or sorted(held) != list(range(1, STEPS + 1)):
        raise ChaosError(f"two undisturbed runs of {name} differ")
    at = next(
        number for number, (_, path) in enumerate(operations, 1) if path.startswith("checkpoints/.tmp-step-00000008")
    )
    stopped = folder / "half.said"
    door = Door(world.training(name, half), folder / "half.log", moments.Moment(half, stopped, at))
    while not moments.said(stopped):
        if door.status() is not None:
            raise ChaosError(f"a run of {name} ended before its moment: {door.text()}")
        time.sleep(0.002)
    send(moments.said(stopped)[0][0], signal.SIGKILL)
    door.ends()
    none_left()
    check_safe(course, half)
    if steps_of(half) != [4, 6]:
        raise ChaosError(f"a killed run of {name} has the checkpoints {steps_of(half)}")
    return course


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


def check_whole(
    course: Course, output: Path, last: Door, *, rows: bool = True, kept: Sequence[int] | None = None
) -> None:
    """A run that has come through equals an undisturbed one to the bit, and nothing of its attempts is left.

    `last`: the command that came through. `kept`: the checkpoints that stay, if not the usual ones.
    """
    said = last.text().replace("\n", " ")
    newest = check_safe(course, output)
    if newest != STEPS or (output / "checkpoints/latest").read_text() != f"step-{STEPS:08d}\n":
        raise ChaosError(f"`latest` names {(output / 'checkpoints/latest').read_text()!r} after {STEPS} steps")
    if rows and rows_of(output) != course.rows:
        raise ChaosError(f"the rows are {rows_of(output)} and not {course.rows}")
    if exports_of(output) != course.exports:
        raise ChaosError(f"exported are {sorted(exports_of(output))} and not {sorted(course.exports)}")
    done = "steps already" in said  # nothing was left to train, to measure and to save
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


def check_said(door: Door, refused: bool) -> None:
    """No traceback, nothing called a bug; where it was `refused`, one line says why."""
    text = door.text()
    for sign in ("Traceback", "this is a bug", "Fatal Python error"):
        if sign in text:
            raise ChaosError(f"it said {sign!r}:\n{text[-3000:]}")
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if len(errors) != int(refused):
        raise ChaosError(f"{len(errors)} lines say an error, and not {int(refused)}:\n{text[-3000:]}")


def copied(source: Path, folder: Path) -> Path:
    """A copy of an output or of a store, to be damaged."""
    return Path(shutil.copytree(source, folder, symlinks=True))


def _must_end(door: Door, status: int) -> None:
    found = door.ends(_FIRST_S)
    none_left()
    if found != status:
        raise ChaosError(f"an undisturbed `bigdit {door.arguments[0]}` ended with {found}: {door.text()[-3000:]}")


def _document(pictures: Path, differs: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "launch/recipes/digits.yaml").read_text())
    document["model"]["kwargs"] |= _MODEL
    document["data"] |= {"images": str(pictures), "buckets": [[16, 16], [16, 24]], "part_size": PART_SIZE, "workers": 2}
    small = {"d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    document["encoders"]["text"]["config"] = small
    document["train"] |= {**TRAINED, "micro_batch_size": 4, "global_batch_size": 8, "warmup_steps": 2}
    document["train"] |= {"ema": {"decay": 0.9}, **differs.get("train", {})}
    document["engine"] = differs["engine"]
    return json.loads(json.dumps(document))  # no aliases
