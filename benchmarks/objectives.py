"""The demo's digits learned by each objective from scratch: how many of 100 samples a classifier reads as asked for.

    python benchmarks/objectives.py [NAME…] [--folder DIR] [--steps N]

One process, fp32, the demo's model and steps (launch/recipes/digits.yaml). The classifier is fitted on the real digits
alone (launch/digits.py); samples are drawn by the objective's default sampler in 20 steps, and by the other one too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from bigdit.report.tables import table

ROOT = Path(__file__).parents[1]
BIGDIT = Path(sys.executable).parent / "bigdit"
SINGLE = ("engine.name=single", "engine.processes=1", "engine.ds_config=null", "train.micro_batch_size=32")
SAMPLES = 100

# By name: what is set beside the recipe, and the samplers.
DDPM = ("dpmsolver++", "ddim")
OBJECTIVES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "flow_matching": ((), ("euler",)),
    "ddpm_v": (("objective.name=ddpm", "objective.prediction=v"), DDPM),
    "ddpm_v_zero_snr": (("objective={name: ddpm, prediction: v, zero_terminal_snr: true, min_snr_gamma: 5}",), DDPM),
    "ddpm_epsilon_learned_variance": (("objective.name=ddpm", "model.kwargs.out_channels=8"), DDPM),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the digits by each objective, and read the samples.")
    parser.add_argument("names", nargs="*", choices=[[], *OBJECTIVES], help="objectives; all where none is named")
    parser.add_argument("--folder", type=Path, default=Path("demo/objectives"), help="where everything is written")
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not (folder / "digits").exists():
        _run(sys.executable, "launch/digits.py", folder / "digits")
    rows = table(f"digits after {arguments.steps} steps", ["objective", "sampler", "read right", "training"])
    for name in arguments.names or OBJECTIVES:
        overrides, samplers = OBJECTIVES[name]
        output = folder / name
        places = (f"data.images={folder / 'digits'}", f"data.features={folder / 'features'}", f"output={output}")
        settings = [*SINGLE, *places, f"train.steps={arguments.steps}", *overrides]
        config = ("--config", "launch/recipes/digits.yaml", *(part for each in settings for part in ("--set", each)))
        _run(BIGDIT, "extract", *config)
        began = time.perf_counter()
        _run(BIGDIT, "train", *config)
        took = f"{time.perf_counter() - began:.0f} s"
        for sampler in samplers:
            rows.add_row(name, sampler, f"{_read(output, sampler)} of {SAMPLES}", took)
    from bigdit import log

    log.out.print(rows)


def _read(output: Path, sampler: str) -> int:
    """How many samples of the run are read as the digit that was asked for."""
    sys.path.insert(0, str(ROOT / "launch"))
    import digits

    asked = [i % len(digits.WORDS) for i in range(SAMPLES)]
    captions, out = output / "captions.txt", output / sampler
    captions.write_text("".join(f"{digits.caption(digit)}\n" for digit in asked))
    drawn = ("--guidance", "2", "--size", "8x8", "--sampler", sampler)
    _run(BIGDIT, "sample", "--checkpoint", output, "--captions", captions, "--out", out, *drawn)
    rows = json.loads((out / "samples.json").read_text())["pictures"]
    found = digits.read_digits([np.asarray(Image.open(out / row["file"])) for row in rows])
    return sum(one == other for one, other in zip(found, asked, strict=True))


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
