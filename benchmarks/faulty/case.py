"""A small extraction, what it makes when nothing disturbs it, and what must be true of any other."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from bigdit.catalog.resolve import model_spec
from bigdit.config import load_run
from bigdit.config.run import RunConfig
from bigdit.extract.extract import extract
from bigdit.extract.job import Job, encode_here
from bigdit.extract.speed import FOLDER as SPEED
from bigdit.sources.open import open_source
from bigdit.store import FeatureStore
from bigdit.store.in_hand import FOLDER as WORKERS
from bigdit.store.in_hand import all_held, remove_left
from bigdit.store.reader import Part

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch/recipes/digits.yaml"
COUNT, PART_SIZE = 40, 2
BROKEN = 7  # this picture is damaged, and skipped
FILES = {"schema.json", "null_text.safetensors", WORKERS, SPEED}


@dataclass(frozen=True)
class Case:
    """Pictures, the store that an undisturbed extraction makes of them, and how long that takes two workers."""

    folder: Path
    job: Job
    parts: dict[str, bytes]
    seconds: float

    def fresh(self, name: str, workers: int = 2) -> Job:
        """The same job in a store that has no parts yet."""
        root = self.folder / name
        root.mkdir()
        for file in ("schema.json", "null_text.safetensors"):
            shutil.copy(self.job.data.features / file, root)
        return replace(self.job, data=self.job.data.model_copy(update={"features": root}), workers=workers)


def make_case(folder: Path) -> Case:
    """Noise of two aspect ratios with captions, encoded by the identity codec and a tiny T5."""
    pictures = folder / "pictures"
    pictures.mkdir(parents=True)
    noise = np.random.default_rng(0)
    for i in range(COUNT):
        pixels = noise.integers(0, 256, (32, 48 if i % 3 else 32), dtype=np.uint8)
        Image.fromarray(pixels).save(pictures / f"{i:02d}.png")
        (pictures / f"{i:02d}.txt").write_text(f"noise number {i % 7}")
    (pictures / f"{BROKEN:02d}.png").write_bytes(b"no picture")
    run = run_config(pictures, folder / "reference")
    extract(run, model_spec(run.model), workers=1)
    root = run.data.features
    parts = visible(root)
    schema = FeatureStore.open(root).schema
    job = Job(run.data, run.encoders, schema, (0, COUNT), None, 2, Path.cwd())
    case = Case(folder, job, parts, 0.0)
    seconds = []
    for number in range(2):  # the first one starts the server of processes
        timed = case.fresh(f"timed-{number}")
        began = time.perf_counter()
        attempt(timed)
        seconds.append(time.perf_counter() - began)
    return replace(case, seconds=seconds[1])


def run_config(pictures: Path, features: Path) -> RunConfig:
    return load_run(
        RECIPE,
        [
            f"data.images={pictures}",
            f"data.features={features}",
            f"data.part_size={PART_SIZE}",
            "data.buckets=[[32, 32], [32, 48]]",
            "encoders.text.config={d_model: 64, d_kv: 8, d_ff: 64, num_layers: 1, num_heads: 2}",
        ],
    )


def attempt(job: Job) -> None:
    """One extraction of what is missing, as the command does it. Raises UserError where a worker died."""
    if job.left():
        encode_here(job, open_source(job.data))


def visible(root: Path) -> dict[str, bytes]:
    """The parts that a reader would find, and their bytes."""
    return {file.name: file.read_bytes() for file in sorted(root.glob("part-*"))}


def check_never_half(case: Case, job: Job) -> None:
    """Every part that is visible is whole and right, and nothing else is."""
    root = job.data.features
    assert visible(root).items() <= case.parts.items(), f"{root} shows parts that are not right"
    strange = {file.name for file in root.iterdir()} - FILES - case.parts.keys()
    assert not strange, f"{root} shows {sorted(strange)}"


def check_whole(case: Case, job: Job) -> None:
    """Every id precisely once, every byte right, and nothing left of the dead."""
    root = job.data.features
    check_never_half(case, job)
    assert visible(root) == case.parts
    ids = sorted(int(row[0]) for part in parts_of(root) for rows in part.rows.values() for row in rows)
    assert ids == [i for i in range(COUNT) if i != BROKEN]
    remove_left(root)
    assert not [held for held in all_held(root) if held.fate != "unknown"]


def parts_of(root: Path) -> Iterator[Part]:
    """All parts, opened."""
    return (Part.open(file) for file in sorted(root.glob("part-*")))
