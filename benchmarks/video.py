"""Videos of a moving digit learned from scratch: how many of 100 samples move, and show the digit, as asked for.

    python benchmarks/video.py [--folder DIR] [--steps N]

One process, fp32, a small Wan on pixels (launch/recipes/digits-moving.yaml). Two classifiers, which are fitted on real
videos and digits alone (launch/moving.py, launch/digits.py), read the samples. Exit status 1 where after STEPS or more
fewer than LEAST are read as asked for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageSequence

from bigdit.report.tables import table

ROOT = Path(__file__).parents[1]
BIGDIT = Path(sys.executable).parent / "bigdit"
SAMPLES, LEAST, STEPS = 100, 90, 2000

sys.path.insert(0, str(ROOT / "launch"))
import digits  # noqa: E402
import moving  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Learn digits that move, and read where the samples do.")
    parser.add_argument("--folder", type=Path, default=Path("demo/video"), help="where everything is written")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    output = folder / f"run-{arguments.steps}"
    if not (folder / "videos").exists():
        moving.write_videos(folder / "videos")
    settings = [f"data.images={folder / 'videos'}", f"data.features={folder / 'features'}", f"output={output}"]
    config = ["--config", "launch/recipes/digits-moving.yaml"]
    config += [part for each in (*settings, f"train.steps={arguments.steps}") for part in ("--set", each)]
    _run(BIGDIT, "extract", *config)
    began = time.perf_counter()
    _run(BIGDIT, "train", *config)
    took = time.perf_counter() - began
    ways, shown = _read(output)
    rows = table(f"moving digits after {arguments.steps} steps", ["read right", "of", "training"])
    rows.add_row("where it moves", f"{ways} of {SAMPLES}", f"{took:.0f} s")
    rows.add_row("which digit", f"{shown} of {SAMPLES}", "")
    from bigdit import log

    log.out.print(rows)
    return int(arguments.steps >= STEPS and min(ways, shown) < LEAST)


def _read(output: Path) -> tuple[int, int]:
    """How many samples of the run move as asked for, and show the digit that was asked for in the middle."""
    names = list(moving.WAYS)
    asked = [(number % 10, names[number // 10 % len(names)]) for number in range(SAMPLES)]
    captions = output / "captions.txt"
    captions.write_text("".join(f"{moving.caption(*each)}\n" for each in asked))
    out = output / "samples"
    shutil.rmtree(out, ignore_errors=True)
    _run(BIGDIT, "sample", "--checkpoint", output, "--captions", captions, "--out", out, "--guidance", "2")
    rows = json.loads((out / "samples.json").read_text())["pictures"]
    found = [_frames(out / row["file"]) for row in rows]
    ways = moving.read_ways(found)
    edge = (moving.SIDE - 8) // 2
    shown = digits.read_digits([video[moving.FRAMES // 2, edge:-edge, edge:-edge] for video in found])
    right = [
        (digit == wanted, way == towards) for digit, way, (wanted, towards) in zip(shown, ways, asked, strict=True)
    ]
    return sum(way for _, way in right), sum(digit for digit, _ in right)


def _frames(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as video:
        return np.stack([np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(video)])


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
