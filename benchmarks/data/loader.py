"""The loader against the sequential read of the same bytes, and against what others do.

    python benchmarks/data/loader.py [--samples 5000] [--folder FOLDER] [--rounds 5] [--json FILE]

Samples are shaped like Sana's: latents of 32 × 32 × 32 in five aspect ratios, and 103 × 2304 hidden states on the mean,
all bf16. Every round runs each design once, one after another, beside a sequential `readinto` of the same files, warm
and cold (posix_fadvise DONTNEED); ratios are taken within a round, and their medians reported.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bigdit.dist import World
from bigdit.loader.order import Order
from bigdit.loader.padded import padded
from bigdit.loader.stream import FeatureStream
from bigdit.store import FeatureStore
from bigdit.store.null_text import write_null_text
from bigdit.store.part import Encoded, Shape, part_path, write_part
from bigdit.store.schema import FILE, StoreSchema, part_identity, schema_text, store_identity
from bigdit.store.text import TEXT, Text

SHAPES = [(32, 32, 32), (32, 28, 36), (32, 36, 28), (32, 24, 42), (32, 42, 24)]
TOKENS, MEAN_TOKENS, DIM = 300, 103, 2304
PART, BATCH, DEPTH, THREADS = 256, 32, 2, 2
SUBSET = 1000  # samples of the designs that need another copy of the data, in RAM or in files


@dataclass(frozen=True)
class Caption:
    """A caption of weight 1."""

    text: str
    weight: float = 1.0


def random_schema(samples: int, tokens: int) -> StoreSchema:
    """Of a store that no encoder made."""
    return StoreSchema(
        codec={"class_name": "random"},
        text_encoder={"max_tokens": tokens},
        buckets=[(height * 32, width * 32) for _, height, width in SHAPES],
        sources=[{"kind": "random", "count": samples, "digest": ""}],
        part_size=PART,
    )


def make_store(root: Path, samples: int) -> None:
    """Commit random features to `root`, unless they are there."""
    schema = random_schema(samples, TOKENS)
    random = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    (root / FILE).write_text(schema_text(schema))
    write_null_text(root, lambda: Text(torch.zeros(2, DIM)), store_identity(schema))
    for start, end in schema.ranges():
        if not part_path(root, start, end).exists():
            found = random_part(random, start, end)
            write_part(part_path(root, start, end), found, identity=part_identity(schema, start))


def random_part(random: np.random.Generator, start: int, end: int) -> Encoded:
    """Features of the range [start, end)."""
    of = {index: SHAPES[random.integers(len(SHAPES))] for index in range(start, end)}
    indices = {shape: [index for index in of if of[index] == shape] for shape in SHAPES}
    latents = {shape: _noise(random, (len(found), *shape)) for shape, found in indices.items()}
    lengths = np.clip(random.gamma(4.0, MEAN_TOKENS / 4.0, end - start).round().astype(int), 8, TOKENS)
    texts = {f"caption {start + i}": Text(_noise(random, (length, DIM))) for i, length in enumerate(lengths)}
    captions = {index: (Caption(f"caption {index}"),) for index in of}
    return Encoded(latents, indices, captions, texts, [])


def _noise(random: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    # Bits that are not compressible, and no infinities: exponents of 64 values.
    bits = random.integers(0, 1 << 16, shape, np.uint16) & np.uint16(0x9FFF) | np.uint16(0x2000)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


Sample = tuple[torch.Tensor, Text]
"""Latents and the text of a caption."""

Place = tuple[Shape, int, int]
"""A sample's bucket, part and row."""


class Samples(Dataset[Sample]):
    """What one would write: a store's samples by their places; each process opens the store for itself."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._store: FeatureStore | None = None

    def __getitem__(self, place: Place) -> Sample:
        if self._store is None:
            self._store = FeatureStore.open(self._root)
        return _sample(self._store, *place)


def places(stream: FeatureStream, steps: int) -> Iterator[list[Place]]:
    """Where the samples of each step's only micro-batch lie."""
    for step in range(steps):
        [(bucket, parts, rows, _)] = stream.samples(step)
        yield [(bucket, *place) for place in zip(parts.tolist(), rows.tolist(), strict=True)]


class Bench:
    """Designs that each go once over the samples and return how many they gave, and their bytes."""

    def __init__(self, root: Path, samples: int) -> None:
        self.root = root
        self.files = sorted(root.glob("part-*"))
        self.store_bytes = sum(file.stat().st_size for file in self.files)
        store = FeatureStore.open(root)
        self.samples = int(store.index.counts.sum())
        self.bytes_a_sample = self.store_bytes / self.samples
        self.steps = self.samples // BATCH
        self.buffer = bytearray(max(file.stat().st_size for file in self.files))
        self.subset = min(SUBSET, self.samples)
        self._in_ram: list[Sample] = []
        self.loose = root.parent / "loose"
        self._make_loose(store)

    def sequential(self) -> int:
        for file in self.files:
            with open(file, "rb", buffering=0) as opened:
                opened.readinto(self.buffer)
        return self.samples

    def loader(self, reader: str = "pread", each: Callable[[], None] = lambda: None) -> int:
        stream = self._stream(FeatureStore.open(self.root, reader))  # type: ignore[arg-type]
        for batches in stream.steps(0, self.steps):
            each()
            del batches
        return self.steps * BATCH

    def _stream(self, store: FeatureStore) -> FeatureStream:
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

    def mmap(self) -> int:
        return self.loader("mmap")

    def data_loader(self) -> int:
        """torch's, with a worker for each of the loader's threads, over the same samples in the same order."""
        batches = places(self._stream(FeatureStore.open(self.root)), self.steps)
        made = DataLoader(Samples(self.root), batch_sampler=batches, num_workers=THREADS, collate_fn=_collate)
        return sum(len(latents) for latents, _, _ in made)

    def _make_loose(self, store: FeatureStore) -> None:
        self.loose.mkdir(exist_ok=True)
        for number, (latents, text) in enumerate(_samples(store, self.subset)):
            if not (self.loose / f"{number}.npz").exists():
                np.save(self.loose / f"{number}.npy", latents.view(torch.int16).numpy())
                mask = np.ones(text.shown, np.int16)
                np.savez(self.loose / f"{number}.npz", states=text.states.view(torch.int16).numpy(), mask=mask)
        os.sync()

    def npy_and_npz(self) -> int:
        """A file of latents and one of text a sample, as PixArt's trainers have it, batches of one shape."""
        chosen = np.random.default_rng(0).permutation(self.subset)
        waiting: dict[tuple[int, ...], list[Sample]] = {}
        for number in chosen.tolist():
            latents = torch.from_numpy(np.load(self.loose / f"{number}.npy")).view(torch.bfloat16)
            with np.load(self.loose / f"{number}.npz") as text:
                states = torch.from_numpy(text["states"]).view(torch.bfloat16)
            batch = waiting.setdefault(tuple(latents.shape), [])
            batch.append((latents, Text(states)))
            if len(batch) == BATCH:
                _collate(waiting.pop(tuple(latents.shape)))
        return self.subset

    def ram_collate(self) -> int:
        """Samples that are in RAM already, by shape, made into padded batches."""
        if not self._in_ram:
            self._in_ram = sorted(_samples(FeatureStore.open(self.root), self.subset), key=lambda each: each[0].shape)
        whole = 0
        for start in range(0, self.subset, BATCH):
            same = [
                each for each in self._in_ram[start : start + BATCH] if each[0].shape == self._in_ram[start][0].shape
            ]
            whole += len(_collate(same)[0])
        return whole

    def evict(self) -> None:
        for file in (*self.files, *self.loose.iterdir()):
            descriptor = os.open(file, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def amplification(self, reader: str) -> float:
        """Bytes that the disk gave for a random tenth of the samples, by those of these samples."""
        self.evict()
        store = FeatureStore.open(self.root, reader)  # type: ignore[arg-type]
        wanted, before = 0, _disk_bytes()
        random = np.random.default_rng(1)
        for bucket, rows in store.buckets.items():
            for position in random.choice(len(rows), len(rows) // 10, replace=False).tolist():
                number, row = rows[position]
                part = store.part(number)
                caption = part.choose_caption(bucket, row, 0.0)
                wanted += part.latents_span(bucket, row)[1] + part.states_span(caption)[1]
                part.advise(bucket, row, caption)
                part.latents(bucket, row)
                part.text(caption)
        return (_disk_bytes() - before) / wanted

    def anonymous_bytes(self) -> tuple[int, int]:
        """The most anonymous memory that the loader took, and what it may take."""
        most, before = 0, _anonymous()

        def look() -> None:
            nonlocal most
            most = max(most, _anonymous() - before)

        self.loader(each=look)
        one = BATCH * (32 * 32 * 32 * 2 + TOKENS * (DIM + 1) * 2)
        return most, 100 * 2**20 + (DEPTH + THREADS + 2) * one


def _sample(store: FeatureStore, shape: Shape, number: int, row: int) -> Sample:
    part = store.part(number)
    return part.latents(shape, row)[1], part.text(part.choose_caption(shape, row, 0.0))


def _samples(store: FeatureStore, count: int) -> Iterator[Sample]:
    places = [
        (store.index.shapes[bucket], number, row)
        for number in range(len(store.index.parts))
        for bucket in range(len(store.index.shapes))
        for row in range(int(store.index.counts[number, bucket]))
    ]
    for place in places[:count]:
        yield _sample(store, *place)


def _collate(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    text, mask, _ = padded([text for _, text in samples], {TEXT: TOKENS})
    return torch.stack([latents for latents, _ in samples]), text, mask


def _disk_bytes() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def _anonymous() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def _cpu_seconds() -> float:
    return sum(
        use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds: rate by the sequential read's in bytes, warm and cold, and CPU ms a sample."""
    designs: dict[str, Callable[[], int]] = {
        "preadv": bench.loader,
        "mmap": bench.mmap,
        "torch DataLoader, 2 workers": bench.data_loader,
        "npy + npz a sample": bench.npy_and_npz,
        "collated from RAM": bench.ram_collate,
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ("sequential", *designs)}
    for number in range(rounds):
        for heat in ("warm", "cold"):
            base = 0.0
            for name, run in {"sequential": bench.sequential, **designs}.items():
                if heat == "cold" and name == "collated from RAM":
                    continue
                if heat == "cold":
                    bench.evict()
                elif number == 0:
                    run()  # into the page cache, and what is made once
                began, cpu = time.perf_counter(), _cpu_seconds()
                samples = run()
                seconds, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
                rate = samples * bench.bytes_a_sample / seconds
                base = base or rate
                found[name].setdefault(heat, []).append(rate / base)
                found[name].setdefault(f"{heat} GB/s", []).append(rate / 1e9)
                found[name].setdefault(f"{heat} CPU ms", []).append(1e3 * cpu / samples)
    ours, ram = (found[name]["warm GB/s"] for name in ("preadv", "collated from RAM"))
    found["preadv"]["of collating"] = [mine / other for mine, other in zip(ours, ram, strict=True)]
    return {
        name: {key: statistics.median(values) for key, values in columns.items()} for name, columns in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--folder", type=Path, help="where the store is made, and left; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        root = (options.folder or Path(temporary)) / "store"
        make_store(root, options.samples)
        bench = Bench(root, options.samples)
        anonymous, allowed = bench.anonymous_bytes()
        amplified = {reader: bench.amplification(reader) for reader in ("pread", "mmap")}
        found = measure(bench, options.rounds)
    print(f"load {os.getloadavg()[0]:.1f}; {bench.samples} samples of {bench.bytes_a_sample / 1e3:.0f} kB")
    print(f"{'':30} {'warm':>6} {'cold':>6} {'GB/s':>6} {'cold':>6} {'CPU ms a sample':>16} {'cold':>6}")
    for name, row in found.items():
        columns = ("warm", "cold", "warm GB/s", "cold GB/s", "warm CPU ms", "cold CPU ms")
        print(f"{name:30}", *(f"{row.get(key, float('nan')):{16 if 'warm C' in key else 6}.2f}" for key in columns))
    ours = found["preadv"]
    print(f"of collating from RAM: {ours['of collating']:.2f}")
    print(f"CPU of npy + npz by ours: {found['npy + npz a sample']['warm CPU ms'] / ours['warm CPU ms']:.2f}")
    print("read amplification of a random tenth:", ", ".join(f"{name} {each:.3f}" for name, each in amplified.items()))
    print(f"anonymous memory: {anonymous / 2**20:.0f} MiB, at most {allowed / 2**20:.0f} MiB are allowed")
    if options.json:
        options.json.write_text(json.dumps({"designs": found, "amplification": amplified, "anonymous": anonymous}))


if __name__ == "__main__":
    main()
