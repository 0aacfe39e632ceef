"""How much faster two workers extract on two cores than one worker, or than a plain loop: interleaved runs, medians.

    python benchmarks/data/extraction.py [--runs 5] [--loop]

Encoders have one thread each: an AutoencoderKL and a T5 with random weights. `steady` counts from the workers' first
unit on, with waiting. `whole` also counts starting processes, loading encoders, and the end, where one worker has
nothing left to do. With `--loop`, two workers encode the demo's digits beside a loop that opens, crops, encodes and
saves them one by one. Neither side then counts its start.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import diffusers
import numpy as np
import torch
from PIL import Image

from bigdit import libraries
from bigdit.catalog.resolve import model_spec
from bigdit.config.run import RunConfig
from bigdit.config.stages import load_run
from bigdit.encoders.latents import bucket_pixels
from bigdit.encoders.load import load_image_codec, load_text_encoder
from bigdit.encoders.protocol import TextEncoder, to_unit_range
from bigdit.extract.extract import Job, encode_here, extract
from bigdit.sources.open import open_source
from bigdit.store.report import read_units, worker_speed
from bigdit.store.schema import StoreSchema, claim

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch/recipes/digits.yaml"
COUNT, PART_SIZE, SIDE = 192, 8, 256
DIGITS, DIGITS_A_PART = 256, 32
LIMIT = 1.9


def main() -> None:
    libraries.prepare()
    parser = argparse.ArgumentParser(description="Time extraction by one worker and by two.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--loop", action="store_true", help="two workers beside a loop, on the demo's digits")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, turns = Path(name), range(asked.runs + 1)  # the first run brings files into the page cache
        if asked.loop:
            subprocess.run([sys.executable, "launch/digits.py", folder / "digits"], cwd=ROOT, check=True)
            _say("a loop, two workers", [_beside_a_loop(folder, number) for number in turns][1:])
            return
        _write(folder)
        found = [(_timed(folder, number, 1), _timed(folder, number, 2)) for number in turns][1:]
    for at, what in enumerate((f"steady, which should reach {LIMIT}", "whole")):
        _say(f"one worker, two; {what}", [(one[at], two[at]) for one, two in found])


def _say(what: str, pairs: Sequence[tuple[float, float]]) -> None:
    """Print both medians, and how many times as fast the second side is."""
    one, two = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = [other / each for each, other in pairs]
    said = f"{one:.1f} and {two:.1f} images/s, {statistics.median(ratios):.2f} ×"
    print(f"{what}: {said} (runs: {' '.join(f'{ratio:.2f}' for ratio in ratios)}; load {os.getloadavg()[0]:.1f})")


def _timed(folder: Path, number: int, workers: int) -> tuple[float, float]:
    """Images per second into a new cache: of all workers from their first unit on, and of the whole run."""
    features = folder / f"features-{number}-{workers}"
    run = load_run(
        RECIPE,
        [
            f"data.images={folder / 'images'}",
            f"data.features={features}",
            f"data.part_size={PART_SIZE}",
            f"data.buckets=[[{SIDE}, {SIDE}]]",
            f"encoders.image={{name: vae, class_name: AutoencoderKL, path: {folder / 'vae'}}}",
            "encoders.text.config={d_model: 256, d_kv: 32, d_ff: 1024, num_layers: 4, num_heads: 8}",
            "encoders.text.max_tokens=120",
        ],
    )
    source = open_source(run.data)
    schema = StoreSchema(
        codec=load_image_codec(run.encoders.image).identity,
        text_encoder=_text_encoder(run).identity,
        buckets=list(run.data.buckets),
        sources=source.identity["sources"],
        part_size=PART_SIZE,
    )
    claim(features, schema)
    job = Job(run.data, run.encoders, schema, (0, COUNT), None, workers, Path.cwd())
    began = time.perf_counter()
    encode_here(job, source)
    return _steady(features), COUNT / (time.perf_counter() - began)


def _text_encoder(run: RunConfig) -> TextEncoder:
    assert run.encoders.text is not None
    return load_text_encoder(run.encoders.text)


def _steady(features: Path) -> float:
    """Images per second of all workers from their first unit on."""
    return sum(worker_speed(*each).images_per_s for each in read_units(features).items())


def _beside_a_loop(folder: Path, number: int) -> tuple[float, float]:
    """Images per second of the loop and of two workers."""
    features = folder / f"features-{number}"
    run = load_run(
        RECIPE, [f"data.images={folder / 'digits'}", f"data.features={features}", f"data.part_size={DIGITS_A_PART}"]
    )
    extract(run, model_spec(run.model), 2, end=DIGITS)
    return _loop(run, folder), _steady(features)


def _loop(run: RunConfig, folder: Path) -> float:
    """Images per second of a plain loop that writes a file for each image."""
    codec, text = load_image_codec(run.encoders.image), _text_encoder(run)
    items = open_source(run.data).items(0, DIGITS)
    began = time.perf_counter()
    for item in items:
        sample = item.load()
        _, pixels = bucket_pixels(sample.image, run.data.buckets, codec.color)
        latents = codec.encode(to_unit_range(torch.tensor(pixels)[None]), [item.index])
        texts = [each.states for each in text.encode([caption.text for caption in sample.captions])]
        torch.save({"latents": latents.to(codec.stored_dtype), "texts": texts}, folder / f"{item.index}.pt")
    return len(items) / (time.perf_counter() - began)


def _write(folder: Path) -> None:
    """Write images, captions, and a small VAE with random weights."""
    (folder / "images").mkdir()
    noise = np.random.default_rng(0)
    for i in range(COUNT):
        small = noise.integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((SIDE + 64, SIDE + 64)).save(folder / f"images/{i:04d}.jpg")
        (folder / f"images/{i:04d}.txt").write_text(f"image {i}: " + "colors that drift into one another, " * 3)
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 32, 32),
        norm_num_groups=8,
        latent_channels=4,
    )
    vae.save_pretrained(folder / "vae")


if __name__ == "__main__":
    main()
