"""Run a recipe's `bigdit extract` on its emulated GPUs with made-up samples, and its encoders alone."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from bigdit import catalog
from bigdit.config.data import frames_of
from bigdit.config.load import parse_run
from bigdit.config.run import RunConfig
from bigdit.config.stages import read_stages
from bigdit.emulator import emulated_environment, shared_state
from bigdit.emulator.emulation import EmulatedRun
from bigdit.emulator.interpreter import cuda_python
from bigdit.emulator.run import run_emulated, workplace
from bigdit.extract.batch_size import EncodeBatch, encode_batch
from bigdit.recipes import MEASURED, Extraction, Recipe

ROOT = Path(__file__).parents[2]
MOST = 8
"""Images of each size. Of videos one, which has as many frames."""


def stages_of(found: Recipe) -> list[dict[str, Any]]:
    """The YAML of each stage, or of the whole run if it has no stages."""
    documents, _ = read_stages(_file(found, MEASURED.parent), [])
    return documents


def waiting_bytes(found: Recipe) -> int:
    """Bytes of encoders' weights that wait in CPU memory if encoders take turns, else 0."""
    turns = [each for each in encode_batches(found, MEASURED.parent) if each.way == "in turns"]
    return max((round(each.need.waiting) for each in turns), default=0)


def emulated_bytes(found: Recipe, folder: Path, samples: int) -> int | None:
    """Bytes that torch allocates if the encoders alone encode this many samples, or as many as fit into a batch.
    `folder` has the recipe and the encoders' weights. None if the catalogue lacks an encoder."""
    taken = (each.need.taken(each.way, min(each.size, samples)) for each in encode_batches(found, folder) if each.way)
    return max(map(round, taken), default=None)


def encode_batches(found: Recipe, folder: Path) -> list[EncodeBatch]:
    """The batch sizes of each stage's encoders for a recipe in `folder`, if the catalogue has all encoders."""
    gpu, (documents, _) = catalog.resolve_gpu(found.about.gpu), read_stages(_file(found, folder), [])
    batches = (encode_batch(parse_run(document, found.name), gpu) for document in documents)
    return [each for each in batches if each is not None]


def _file(found: Recipe, folder: Path) -> Path:
    return folder / f"{found.name}.yaml"


def extraction(found: Recipe, hub: Path, folder: Path) -> Extraction:
    """What extraction takes of a GPU, for MOST images or one video of each of the largest sizes. Captions fill all
    tokens. Raises RuntimeError if it fails."""
    each = 1 if found.samples == "videos" else MOST
    run = extracted(found, hub, folder, each)
    if run.exit_status or run.highest is None:
        raise RuntimeError(f"{found.name}: extraction ended with {run.exit_status}")
    cards = [card for account in run.accounts for card in account.gpus]
    return Extraction(
        samples=each,
        peak_allocated_bytes=max(card.peak_allocated_bytes for card in cards),
        peak_reserved_bytes=max(card.peak_reserved_bytes for card in cards),
        ran_out=any(account.out_of_memory_count for account in run.accounts),
        emulated_bytes=emulated_bytes(found, folder, each),
    )


def extracted(found: Recipe, hub: Path, folder: Path, each: int, *changed: str, values: bool = True) -> EmulatedRun:
    """Run `bigdit extract` on the recipe's GPUs, in `folder`, for this many samples of each size. Returns what its
    processes took. Without `values` it is faster, and a pipeline that keeps the tokens of a mask, such as
    Qwen-Image's, keeps none."""
    asked = asked_of(found, hub, folder, each, *changed, values=values)
    with contextlib.chdir(folder), workplace() as place, asked as (command, environment):
        return run_emulated(command, [environment], place)


@contextlib.contextmanager
def asked_of(
    found: Recipe, hub: Path, folder: Path, each: int, *changed: str, values: bool = True
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command that is `extracted`, and its environment."""
    weights = weights_in(hub, found)
    _file(found, folder).write_text(found.text.replace(found.weights, str(weights)))
    count = make_samples(parse_run(stages_of(found)[-1], found.name), folder, each)
    own = [f"data.part_size={-(-count // found.processes)}", *changed]
    command = [str(cuda_python()), "-W", "ignore", "-c", "from bigdit.cli import main; main()", "extract"]
    command += ["--config", f"{found.name}.yaml", *(part for change in own for part in ("--set", change))]
    with shared_state() as state:
        environment = emulated_environment(catalog.resolve_gpu(found.about.gpu), found.processes, state, values=values)
        yield command, environment | {"PYTHONPATH": os.pathsep.join((str(ROOT), environment["PYTHONPATH"]))}


def weights_in(hub: Path, found: Recipe) -> Path:
    """The recipe's repository in a hub cache."""
    (weights,) = hub.glob(f"models--{found.about.repository.replace('/', '--')}/snapshots/*")
    return weights


def make_samples(run: RunConfig, folder: Path, each: int) -> int:
    """Make images or videos of each of the run's sizes where the run looks for them, below `folder`. Returns their
    count."""
    (source,) = run.data.images
    root = folder / source.path
    if source.label is not None:
        root /= "fox"
    root.mkdir(parents=True)
    for number, bucket in enumerate(run.data.buckets):
        for sample in range(each):
            file = root / f"{number}-{sample}"
            _write(file, bucket, sample, run.data.fps)
            file.with_suffix(".txt").write_text(f"number {sample}" + " and more of it" * 200)
            if run.data.references:
                _write(file.with_suffix(".reference"), bucket, 255 - sample, None)
    return each * len(run.data.buckets)


def _write(file: Path, bucket: tuple[int, ...], shade: int, fps: float | None) -> None:
    """Write an image of one colour, or an animation that lasts somewhat longer than its frames at `fps`."""
    *_, height, width = bucket
    frames = [Image.new("RGB", (width, height), (90 * number % 256, shade, 9)) for number in range(frames_of(bucket))]
    if fps is None:
        frames[0].save(f"{file}.png")
    else:
        shown = 10 * math.ceil(100 / fps)  # a GIF counts in hundredths of a second
        frames[0].save(file.with_suffix(".gif"), save_all=True, append_images=frames[1:], duration=shown)
