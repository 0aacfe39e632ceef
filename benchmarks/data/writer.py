"""The writer of parts against a sequential write and fsync of the same bytes, and what an encoder waits for it.

    python benchmarks/data/writer.py [--parts 8] [--folder FOLDER] [--rounds 5]

Parts are Sana-shaped, as in benchmarks/data/loader.py, 256 samples each, with digests. Every round writes the same
bytes three times, one after another: with write and fsync; by `write_part`; and by `PartWriter` under an encoder that
computes for as long as a part takes to be written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from loader import PART, random_part

from bigdit.files import fsync_folder
from bigdit.store.part import part_path, write_part
from bigdit.store.writer import PartWriter


def sequential(folder: Path, data: bytes, parts: int) -> float:
    began = time.perf_counter()
    for number in range(parts):
        with open(folder / f"plain-{number}", "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        fsync_folder(folder)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    encoded = random_part(np.random.default_rng(0), 0, PART)
    ratios, waits, stalls, rates = [], [], [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            folder = Path(temporary)
            write_part(part_path(folder, 0, PART), encoded, identity="")
            data = part_path(folder, 0, PART).read_bytes()
            limit = sequential(folder, data, options.parts)
            began = time.perf_counter()
            for number in range(options.parts):
                write_part(part_path(folder, number * PART, (number + 1) * PART), encoded, identity="")
            written = time.perf_counter() - began
            encoding = written / options.parts
            waited = []
            with PartWriter() as writer:
                for number in range(options.parts):
                    time.sleep(encoding)  # an encoder on a card, or in other processes
                    began = time.perf_counter()
                    writer.write(part_path(folder, number * PART, (number + 1) * PART), encoded, "")
                    waited.append(time.perf_counter() - began)
        ratios.append(limit / written)
        rates.append(len(data) * options.parts / written / 1e9)
        waits.append(statistics.median(waited) * 1e3)
        stalls.append(sum(waited) / (options.parts * encoding))
    print(f"load {os.getloadavg()[0]:.1f}; {options.parts} parts of {len(data) / 1e6:.0f} MB")
    print(
        f"write_part of sequential write + fsync: {statistics.median(ratios):.2f} ({statistics.median(rates):.2f} GB/s)"
    )
    print(f"an encoder of the writer's pace waits {statistics.median(waits):.2f} ms a part on the median,")
    print(f"{statistics.median(stalls):.1%} of its time in all")


if __name__ == "__main__":
    main()
