"""What a lane of rounds disturbs: pictures, a config, and what comes of them when nobody disturbs anything."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from chaotic import moments
from chaotic.checks import STEPS, Course, check_safe, checkpoints, exports_of, rows_of, steps_of, tensors_of
from chaotic.processes import ChaosError, Door, none_left, send

ROOT = Path(__file__).parents[2]
PICTURES, PART_SIZE = 40, 4
TRAINED = {"steps": STEPS, "checkpoint_every": 2, "keep_checkpoints": 2, "keep_every": 4, "export_every": 4}
_MODEL = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "num_cross_attention_heads": 4}
_MODEL |= {"cross_attention_head_dim": 8, "cross_attention_dim": 32}

COURSES: dict[str, dict[str, Any]] = {
    "single": {"engine": "single"},
    "fsdp2": {"engine": "fsdp2", "world_size": 2, "precision": "fp32"},
    "fp32": {"engine": "single", "precision": "fp32"},
    "zero2": {"engine": "deepspeed", "world_size": 2, "ds_config": str(ROOT / "ds_configs/zero2_bf16.json")},
}
"""Runs by their engines: what differs in their strategies."""


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
        _must_end(door)
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


@functools.cache
def _course(world: World, name: str) -> Course:
    folder = world.folder / f"course-{name}"
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
    folder.mkdir()
    every, whole, half = folder / "every", folder / "whole", folder / "half"
    all_of_them = ("train.keep_checkpoints=99", "train.checkpoint_every=1")
    _must_end(Door(world.training(name, every, *all_of_them), folder / "every.log"))
    said = folder / "whole.said"
    began = time.perf_counter()
    _must_end(Door(world.training(name, whole), folder / "whole.log", moments.Moment(whole, said)))
    seconds = time.perf_counter() - began
    operations = [(event, path) for _, event, path in moments.said(said)]
    held = {found.step: tensors_of(found) for found in checkpoints(every)}
    course = Course(name, held, rows_of(whole), exports_of(whole), steps_of(whole), operations, seconds, whole, half)
    if rows_of(every) != course.rows or sorted(held) != list(range(1, STEPS + 1)):
        raise ChaosError(f"two undisturbed runs of {name} differ")
    eighth = "checkpoints/.tmp-step-00000008"
    at = next(number for number, (_, path) in enumerate(operations, 1) if path.startswith(eighth))
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


def copied(source: Path, folder: Path) -> Path:
    """A copy of an output or of a store, to be damaged."""
    return Path(shutil.copytree(source, folder, symlinks=True))


def _must_end(door: Door) -> None:
    found = door.ends()
    none_left()
    if found != 0:
        raise ChaosError(f"an undisturbed `bigdit {door.arguments[0]}` ended with {found}: {door.text()[-3000:]}")


def _document(pictures: Path, differs: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "launch/recipes/digits.yaml").read_text())
    document["model"]["kwargs"] |= _MODEL
    document["data"] |= {"images": str(pictures), "buckets": [[16, 16], [16, 24]], "part_size": PART_SIZE, "workers": 2}
    small = {"d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    document["encoders"]["text"]["config"] = small
    document["train"] |= {**TRAINED, "warmup_steps": 2}
    document["strategy"] |= {"world_size": 1, "ds_config": None, "micro_batch_size": 4, "global_batch_size": 8}
    document["strategy"] |= {"precision": "bf16", "ema": {"decay": 0.9}, **differs}
    plain: dict[str, Any] = json.loads(json.dumps(document))  # or YAML has aliases
    return plain
