"""What it takes to open sources of many pictures: seconds, and what the process grows by at its peak.

    python benchmarks/data/sources.py --count 1000000 --scratch DIR

Each kind is made where it is not there yet, opened in a process of its own, and asked for the items of ten units of 256
spread over it. Files of pictures are empty: none is decoded.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER, TAR, GROUP = 1000, 10_000, 10_000  # pictures in a folder, in a tar, in a row group
UNIT, UNITS = 256, 10

PROBE = """
import json, resource, sys, time
from bigdit.config.data import DataConfig
from bigdit.sources.open import open_source
path, features = sys.argv[1:]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for kind in ("csv_rows", "file_rows", "webdataset"):
    __import__(f"bigdit.sources.{kind}")
before, began, cpu = peak(), time.perf_counter(), time.process_time()
source = open_source(DataConfig(images=path, features=features, buckets=[(8, 8)]))
opened, cpu = time.perf_counter(), time.process_time() - cpu
starts = range(0, len(source), max(len(source) // UNITS, 1))
items = sum(len(source.items(start, start + UNIT)) for start in starts)
print(json.dumps([len(source), opened - began, cpu, (time.perf_counter() - opened) / len(starts), peak() - before]))
""".replace("UNITS", str(UNITS)).replace("UNIT", str(UNIT))


def caption(number: int) -> str:
    """A caption of about 150 bytes."""
    return f"a photograph, number {number}, " + "of a quiet street in the evening, with lamps and wet stones " * 2


def make_folder(path: Path, count: int) -> None:
    """Pictures in folders of a thousand, a caption beside each."""
    for first in range(0, count, FOLDER):
        folder = path / f"{first // FOLDER:05d}"
        folder.mkdir(parents=True)
        for number in range(first, min(first + FOLDER, count)):
            (folder / f"{number:09d}.jpg").touch()
            (folder / f"{number:09d}.txt").touch()


def make_csv(path: Path, count: int) -> None:
    """One file of paths and captions, which hold commas and so are quoted."""
    with path.open("w") as file:
        file.write("path,caption\n")
        for number in range(count):
            file.write(f'{number // FOLDER:05d}/{number:09d}.jpg,"{caption(number)}"\n')


def make_parquet(path: Path, count: int) -> None:
    """One file of paths and captions."""
    schema = pa.schema([("path", pa.string()), ("caption", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, count, GROUP):
            numbers = range(first, min(first + GROUP, count))
            names = [f"{number // FOLDER:05d}/{number:09d}.jpg" for number in numbers]
            writer.write_table(pa.table([names, [caption(number) for number in numbers]], schema))


def make_tars(path: Path, count: int) -> None:
    """Tars of ten thousand pictures with captions."""
    path.mkdir()
    for first in range(0, count, TAR):
        with tarfile.open(path / f"{first // TAR:05d}.tar", "w") as archive:
            for number in range(first, min(first + TAR, count)):
                for name, content in ((f"{number:09d}.jpg", b"x" * 600), (f"{number:09d}.txt", b"a caption")):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


SUFFIX = {"csv": ".csv", "parquet": ".parquet"}
KINDS: dict[str, Callable[[Path, int], None]] = {
    "folder": make_folder,
    "csv": make_csv,
    "parquet": make_parquet,
    "webdataset": make_tars,
}


def main() -> None:
    """Print a table row for each kind; tars are opened twice, without and with their indices."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=1_000_000)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    asked = arguments.parse_args()
    asked.scratch.mkdir(parents=True, exist_ok=True)
    print("| source | pictures | open, s | of CPU, s | 256 items, ms | grows by, MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in asked.kinds:
        path = asked.scratch / f"{kind}-{asked.count}{SUFFIX.get(kind, '')}"
        if not path.exists():
            KINDS[kind](path, asked.count)
        for again in ("", ", again"):
            probe = [sys.executable, "-c", PROBE, str(path), str(asked.scratch / "features")]
            done = subprocess.run(probe, capture_output=True, text=True, check=True, timeout=3600)
            count, seconds, cpu, unit, grown = json.loads(done.stdout)
            figures = f"{seconds:.2f} | {cpu:.2f} | {unit * 1e3:.1f} | {grown / 1e6:.0f}"
            print(f"| {kind}{again} | {count:,} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
