"""The digits learned from scratch, by each objective and by class: how many of 100 samples are read as asked for.

    python benchmarks/objectives.py [NAME…] [--folder DIR] [--steps N]

One process, fp32, the demo's model and steps (launch/recipes/digits.yaml), and a DiT of classes without captions
(launch/recipes/digits-classes.yaml). The classifier is fitted on the real digits alone (launch/digits.py); samples are
drawn by the objective's default sampler in 20 steps, and by the other one too. Exit status 1 where after the 800 steps
that the recipe has, or more, fewer are read as asked for than a case has to have at the least.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from bigdit.report.tables import table

ROOT = Path(__file__).parents[1]
BIGDIT = Path(sys.executable).parent / "bigdit"
SINGLE = ("strategy.engine=single", "strategy.world_size=1", "strategy.ds_config=null", "strategy.micro_batch_size=32")
SAMPLES, STEPS = 100, 800

DDPM = ("dpmsolver++", "ddim")


class Case(NamedTuple):
    """What is set beside the recipe, and the samplers; `classes`: the recipe without captions; `least`: how many
    samples are read as asked for."""

    overrides: tuple[str, ...]
    samplers: tuple[str, ...] = DDPM
    classes: bool = False
    least: int = 90

    @property
    def recipe(self) -> str:
        return f"launch/recipes/digits{'-classes' * self.classes}.yaml"


OBJECTIVES = {
    "flow_matching": Case((*SINGLE,), ("euler",)),
    "ddpm_v": Case((*SINGLE, "objective.name=ddpm", "objective.prediction=v")),
    "ddpm_v_zero_snr": Case(
        (*SINGLE, "objective={name: ddpm, prediction: v, zero_terminal_snr: true, min_snr_gamma: 5}")
    ),
    "ddpm_epsilon_learned_variance": Case((*SINGLE, "objective.name=ddpm", "model.kwargs.out_channels=8")),
    "classes_flow_matching": Case(("objective={name: flow_matching}",), ("euler",), classes=True),
    "classes_ddpm_v": Case(("objective={name: ddpm, prediction: v, learned_variance: false}",), classes=True),
    # Half of them are, since nearly clean digits weigh most in that loss: what min-SNR weights are for.
    "classes_ddpm_epsilon_learned_variance": Case(("objective={name: ddpm}",), classes=True, least=0),
    "classes_ddpm_epsilon_learned_variance_min_snr": Case((), classes=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Learn the digits by each objective, and read the samples.")
    parser.add_argument("names", nargs="*", choices=[[], *OBJECTIVES], help="objectives; all where none is named")
    parser.add_argument("--folder", type=Path, default=Path("demo/objectives"), help="where everything is written")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    rows = table(f"digits after {arguments.steps} steps", ["objective", "sampler", "read right", "training"])
    short = False
    for name in arguments.names or OBJECTIVES:
        case, output = OBJECTIVES[name], folder / name
        settings = [*_data(folder, case), f"output={output}", f"train.steps={arguments.steps}", *case.overrides]
        config = ("--config", case.recipe, *(part for each in settings for part in ("--set", each)))
        _run(BIGDIT, "extract", *config)
        began = time.perf_counter()
        _run(BIGDIT, "train", *config)
        took = f"{time.perf_counter() - began:.0f} s"
        for sampler in case.samplers:
            read = _read(output, sampler, case)
            short |= read < case.least
            rows.add_row(name, sampler, f"{read} of {SAMPLES}", took)
    from bigdit import log

    log.out.print(rows)
    return int(short and arguments.steps >= STEPS)


def _data(folder: Path, case: Case) -> list[str]:
    """The digits with captions, or in a folder a class, written where they are not there yet; and their features."""
    name = "classes" if case.classes else "digits"
    if not (folder / name).exists():
        _run(sys.executable, "launch/digits.py", folder / name, *["--classes"] * case.classes)
    images = f"{{path: {folder / name}, label: folder}}" if case.classes else str(folder / name)
    return [f"data.images={images}", f"data.features={folder / 'features'}{'-of-classes' * case.classes}"]


def _read(output: Path, sampler: str, case: Case) -> int:
    """How many samples of the run are read as the digit that was asked for."""
    sys.path.insert(0, str(ROOT / "launch"))
    import digits

    asked = [i % len(digits.WORDS) for i in range(SAMPLES)]
    captions, out = output / "captions.txt", output / sampler
    named = digits.WORDS.__getitem__ if case.classes else digits.caption
    captions.write_text("".join(f"{named(digit)}\n" for digit in asked))
    drawn = ("--guidance", "2", "--size", "8x8", "--sampler", sampler)
    shutil.rmtree(out, ignore_errors=True)
    _run(BIGDIT, "sample", "--checkpoint", output, "--captions", captions, "--out", out, *drawn)
    rows = json.loads((out / "samples.json").read_text())["pictures"]
    found = digits.read_digits([np.asarray(Image.open(out / row["file"])) for row in rows])
    return sum(one == other for one, other in zip(found, asked, strict=True))


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
