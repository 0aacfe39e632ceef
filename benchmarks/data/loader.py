"""Batches of 32 Sana-shaped samples in the page cache: bigdit's loader and torch's DataLoader, interleaved.

    python benchmarks/data/loader.py [--samples 5000] [--rounds 5]

It writes a cache of random features: about 550 kB a sample, so 3 GB of disk and page cache for 5,000. Both sides read
the same samples in the same order, the loader by two threads and the DataLoader by two processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bigdit.dist import World
from bigdit.loader.buffers import padded
from bigdit.loader.order import Order
from bigdit.loader.stream import FeatureStream
from bigdit.sources.protocol import Caption
from bigdit.store import FeatureStore
from bigdit.store.part import EncodedRange, Shape, part_path, write_part
from bigdit.store.schema import FILE, StoreSchema, part_identity, schema_text, store_identity
from bigdit.store.store import write_null_text
from bigdit.store.text import TEXT, Text, TextKey

SHAPES = [(32, 32, 32), (32, 28, 36), (32, 36, 28), (32, 24, 42), (32, 42, 24)]
TOKENS, MEAN_TOKENS, DIM = 300, 103, 2304
PART, BATCH, DEPTH, THREADS = 256, 32, 2, 2


def make_store(root: Path, samples: int) -> None:
    """Write random features to `root`, unless they are there."""
    schema = StoreSchema(
        codec={"class_name": "random"},
        text_encoder={"max_tokens": TOKENS},
        buckets=[(height * 32, width * 32) for _, height, width in SHAPES],
        sources=[{"kind": "random", "count": samples, "digest": ""}],
        part_size=PART,
    )
    random = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    (root / FILE).write_text(schema_text(schema))
    write_null_text(root, lambda: Text(torch.zeros(2, DIM)), store_identity(schema))
    for start, end in schema.ranges():
        if not part_path(root, start, end).exists():
            found = random_part(random, start, end)
            write_part(part_path(root, start, end), found, identity=part_identity(schema, start))


def random_part(random: np.random.Generator, start: int, end: int) -> EncodedRange:
    """Features of the range [start, end)."""
    of = {index: SHAPES[random.integers(len(SHAPES))] for index in range(start, end)}
    indices: dict[Shape, list[int]] = {shape: [index for index in of if of[index] == shape] for shape in SHAPES}
    latents: dict[Shape, torch.Tensor] = {
        shape: _noise(random, (len(found), *shape)) for shape, found in indices.items()
    }
    lengths = np.clip(random.gamma(4.0, MEAN_TOKENS / 4.0, end - start).round().astype(int), 8, TOKENS)
    texts: dict[TextKey, Text] = {
        f"caption {start + i}": Text(_noise(random, (length, DIM))) for i, length in enumerate(lengths)
    }
    captions = {index: (Caption(f"caption {index}"),) for index in of}
    return EncodedRange(latents, indices, captions, texts, [])


def _noise(random: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    # Bits that do not compress, without infinities: exponents of 64 values.
    bits = random.integers(0, 1 << 16, shape, np.uint16) & np.uint16(0x9FFF) | np.uint16(0x2000)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


Sample = tuple[torch.Tensor, Text]
"""Latents and a caption's text."""

Place = tuple[Shape, int, int]
"""A sample's bucket, part and row."""


class Samples(Dataset[Sample]):
    """A plain Dataset: a cache's samples by their places. Each process opens the cache for itself."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._store: FeatureStore | None = None

    def __getitem__(self, place: Place) -> Sample:
        if self._store is None:
            self._store = FeatureStore.open(self._root)
        shape, number, row = place
        part = self._store.part(number)
        return part.latents(shape, row)[1], part.text(part.choose_caption(shape, row, 0.0))


def places(stream: FeatureStream, steps: int) -> Iterator[list[Place]]:
    """The places of the samples in each step's only micro-batch."""
    for step in range(steps):
        [(bucket, parts, rows, _)] = stream.samples(step)
        yield [(bucket, *place) for place in zip(parts.tolist(), rows.tolist(), strict=True)]


class Bench:
    """Ways to read a cache once. Each returns how many samples it read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.samples = int(FeatureStore.open(root).index.counts.sum())
        self.bytes_a_sample = sum(file.stat().st_size for file in root.glob("part-*")) / self.samples
        self.steps = self.samples // BATCH

    def loader(self) -> int:
        for batches in self._stream().steps(0, self.steps):
            del batches
        return self.steps * BATCH

    def data_loader(self) -> int:
        """torch's DataLoader, with a worker for each of the loader's threads, over the same samples in the same
        order."""
        batches = places(self._stream(), self.steps)
        made = DataLoader(Samples(self.root), batch_sampler=batches, num_workers=THREADS, collate_fn=_collate)
        return sum(len(latents) for latents, _, _ in made)

    def _stream(self) -> FeatureStream:
        store = FeatureStore.open(self.root)
        return FeatureStream(
            store,
            World(),
            Order(store.index.counts, store.index.shapes, BATCH, seed=0),
            micro_batch_size=BATCH,
            grad_accum_steps=1,
            seed=0,
            caption_dropout=0.0,
            read_ahead_steps=DEPTH,
            threads=THREADS,
        )


def _collate(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    text, mask, _ = padded([text for _, text in samples], {TEXT: TOKENS})
    return torch.stack([latents for latents, _ in samples]), text, mask


def measure(bench: Bench, rounds: int) -> tuple[list[float], list[float]]:
    """GB/s of both in each round, after one that fills the page cache."""
    rates: tuple[list[float], list[float]] = [], []
    for number in range(rounds + 1):
        for run, found in zip((bench.loader, bench.data_loader), rates, strict=True):
            began = time.perf_counter()
            gigabytes = run() * bench.bytes_a_sample / 1e9
            if number:
                found.append(gigabytes / (time.perf_counter() - began))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--folder", type=Path, help="where the store is made, and left; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        root = (options.folder or Path(temporary)) / "store"
        make_store(root, options.samples)
        bench = Bench(root)
        ours, theirs = measure(bench, options.rounds)
    print(f"load {os.getloadavg()[0]:.1f}; {bench.samples} samples of {bench.bytes_a_sample / 1e3:.0f} kB")
    print(f"loader {statistics.median(ours):.2f} GB/s, torch's DataLoader {statistics.median(theirs):.2f} GB/s")
    print(f"times as fast: {statistics.median(one / other for one, other in zip(ours, theirs, strict=True)):.2f}")


if __name__ == "__main__":
    main()
