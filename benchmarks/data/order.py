"""Thirty million samples: from the start to the first batch, and the memory it takes.

    python benchmarks/data/order.py [--samples 30000000] [--folder FOLDER]

A folder with the name of every part, the index that a first start leaves, and real parts for the first batches: then a
new process opens the store, plans the order and reads the first batch, as a rank of a training run does.
Parts hold small latents and texts; the number of parts, buckets and rows is that of the whole.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH, TOKENS, DIM = 256, 20, 64
SECONDS, MEGABYTES = 5.0, 300.0


def make(root: Path, samples: int) -> None:
    """The store: names, index, and the parts of the first batches."""
    import numpy as np
    import torch
    from loader import SHAPES, Caption, random_schema

    from bigdit.loader.order import Order
    from bigdit.store.index import FILE as INDEX
    from bigdit.store.index import Index, write_index
    from bigdit.store.null_text import write_null_text
    from bigdit.store.part import Encoded, part_name, write_part
    from bigdit.store.schema import FILE, part_identity, schema_text, store_identity
    from bigdit.store.text import Text

    schema = random_schema(samples, TOKENS)
    (root / FILE).write_text(schema_text(schema))
    write_null_text(root, lambda: Text(torch.zeros(2, DIM)), store_identity(schema))
    ranges = schema.ranges()
    random = np.random.default_rng(0)
    shapes = tuple(sorted(SHAPES))
    counts = random.multinomial([end - start for start, end in ranges], [1 / len(shapes)] * len(shapes))
    counts = counts.astype(np.int64)
    parts = np.array([(start, end, 0) for start, end in ranges], np.int64)
    for start, end in ranges:
        (root / part_name(start, end)).touch()
    order = Order(counts, shapes, BATCH, seed=0)
    for number in sorted({0, *(int(part) for step in range(2) for part in order.batch(step).parts)}):
        start, end = ranges[number]
        chosen = np.repeat(np.arange(len(shapes)), counts[number])
        indices = {
            shape: [start + place for place in np.flatnonzero(chosen == column).tolist()]
            for column, shape in enumerate(shapes)
        }
        encoded = Encoded(
            {shape: torch.zeros(len(found), *shape, dtype=torch.bfloat16) for shape, found in indices.items()},
            indices,
            {index: (Caption("a caption"),) for index in range(start, end)},
            {"a caption": Text(torch.zeros(TOKENS, DIM))},
            [],
        )
        path = root / part_name(start, end)
        write_part(path, encoded, identity=part_identity(schema, start))
        parts[number, 2] = path.stat().st_size
    write_index(root / INDEX, Index(shapes, parts, counts), store_identity(schema))


def most_megabytes() -> float:
    """The most memory that this process has had: getrusage would count what its parent had when it was started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 / 1e6 * sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def first_batch(root: Path) -> None:
    """In a process of its own: print seconds and the most memory, imports of torch in both."""
    began = time.perf_counter()
    from bigdit.dist import World
    from bigdit.loader.order import Order
    from bigdit.loader.stream import FeatureStream
    from bigdit.store import FeatureStore

    imported, before = time.perf_counter() - began, most_megabytes()
    store = FeatureStore.open(root)
    opened = time.perf_counter() - began
    order = Order(store.index.counts, store.index.shapes, BATCH, seed=0)
    stream = FeatureStream(
        store, World(), order, micro_batch_size=16, grad_accum_steps=16, seed=0, caption_dropout=0.1, read_ahead_steps=0
    )
    steps = stream.steps(0, 1)
    next(steps)
    first = time.perf_counter() - began
    began = time.perf_counter()
    for step in range(0, 300_000, 1000):  # anywhere in three epochs
        order.batch(step)
    anywhere = (time.perf_counter() - began) / 300
    steps.close()
    most = most_megabytes()
    print(f"{int(store.index.counts.sum())} samples in {len(store.index.parts)} parts: first batch after {first:.2f} s")
    print(
        f"(imports {imported:.2f}, index {opened - imported:.2f}); at most {most:.0f} MB ({before:.0f} after imports);"
    )
    print(f"a batch anywhere in three epochs is found in {1e3 * anywhere:.1f} ms")
    print("as asked" if first < SECONDS and most < MEGABYTES else f"not within {SECONDS} s and {MEGABYTES} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=30_000_000)
    parser.add_argument("--folder", type=Path, help="where the temporary store is made")
    parser.add_argument("--first-batch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_batch:
        first_batch(options.first_batch)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        make(Path(temporary), options.samples)
        for _ in range(2):
            subprocess.run([sys.executable, __file__, "--first-batch", temporary], check=True)


if __name__ == "__main__":
    main()
