"""The digits learned by each optimizer from the same weights: how far what is held out ends from AdamW in fp32.

    python benchmarks/optimizers.py [NAME…] [--folder DIR] [--steps N]

One process, the demo's model and steps (launch/recipes/digits.yaml). All runs see the same samples with the same
noise, and hold out the same 200, whose loss is at fixed t and noise; the yardstick is AdamW in fp32 with other seeds,
which sees its samples in another order, with other noise. What is wrong on purpose is beside it: a tenth and ten times
of AdamW's rate. Exit status 1 where after STEPS, or more, a case ends WORSE than AdamW in fp32 by a larger share, or
what is wrong on purpose does not.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from bigdit import models
from bigdit.config import load_run
from bigdit.report.tables import table
from bigdit.spec import ModelSpec
from bigdit.train.seen.metrics import read_metrics

ROOT = Path(__file__).parents[1]
BIGDIT = Path(sys.executable).parent / "bigdit"
RECIPE = ROOT / "launch/recipes/digits.yaml"
SINGLE = ("strategy.engine=single", "strategy.world_size=1", "strategy.ds_config=null", "strategy.micro_batch_size=32")

STEPS = 800

WORSE = 0.05
"""Of the loss that is held out: other seeds of AdamW's come within half of it."""

CAME_RATE = 0.2
"""Of AdamW's. CAME divides by its confidence once more: at AdamW's own rate it hardly learns."""


class Case(NamedTuple):
    """An optimizer and a precision; its `rate` is that share of the recipe's, and `seed` of order and noise."""

    optimizer: str = "adamw"
    precision: str = "fp32"
    rate: float = 1.0
    seed: int = 0

    def overrides(self, lr: float) -> list[str]:
        """What is set beside the recipe, whose rate is `lr`."""
        return [
            f"strategy.optimizer.name={self.optimizer}",
            f"strategy.optimizer.lr={self.rate * lr}",
            f"strategy.precision={self.precision}",
            f"train.seed={self.seed}",
        ]


REFERENCE = "AdamW"
OTHER_SEEDS = {f"AdamW, seed {seed}": Case(seed=seed) for seed in (1, 2)}
CASES = {
    "AdamW in 8 bits": Case("adamw_8bit"),
    "CAME": Case("came", rate=CAME_RATE),
    "CAME in 8 bits": Case("came_8bit", rate=CAME_RATE),
    "AdamW, bf16 with masters": Case(precision="bf16"),
    "AdamW, bf16_sr": Case(precision="bf16_sr"),
    "CAME in 8 bits, bf16_sr": Case("came_8bit", "bf16_sr", CAME_RATE),
}
WRONG = {"AdamW at a tenth of its rate": Case(rate=0.1), "AdamW at ten times its rate": Case(rate=10.0)}
EVERY = {REFERENCE: Case(), **OTHER_SEEDS, **CASES, **WRONG}


def write_start(folder: Path, overrides: list[str]) -> None:
    """The weights that all runs start from, as diffusers saves them."""
    run = load_run(RECIPE, overrides)
    assert run.model.class_name is not None
    spec = ModelSpec(name="start", class_name=run.model.class_name, kwargs=run.model.kwargs)
    models.build(spec, device="cpu", dtype=torch.float32, seed=0).save_pretrained(folder)


def validation_loss(output: Path) -> float:
    """Of what was held out, after a run's last step."""
    return float(read_metrics(output / "metrics.jsonl")[-1]["validation_loss"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Learn the digits by each optimizer, and hold the losses apart.")
    parser.add_argument("names", nargs="*", choices=[[], *EVERY], help="which beside AdamW; all where none is named")
    parser.add_argument("--folder", type=Path, default=Path("demo/optimizers"), help="where everything is written")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not (folder / "digits").exists():
        _run(sys.executable, "launch/digits.py", folder / "digits")
    shared = [
        f"data.images={folder / 'digits'}",
        f"data.features={folder / 'features'}",
        f"model.init_from={folder / 'start'}",
        f"train.steps={arguments.steps}",
        f"validation={{samples: 200, every: {arguments.steps}}}",
        *SINGLE,
    ]
    write_start(folder / "start", shared)
    _run(BIGDIT, "extract", "--config", RECIPE, *_set(shared))
    lr = yaml.safe_load(RECIPE.read_text())["strategy"]["optimizer"]["lr"]
    losses = {}
    for name in dict.fromkeys([REFERENCE, *(arguments.names or EVERY)]):
        output = folder / f"{name}, {arguments.steps}".replace(",", "").replace(" ", "-")
        chosen = [*shared, *EVERY[name].overrides(lr), f"output={output}"]
        _run(BIGDIT, "train", "--config", RECIPE, *_set(chosen))
        losses[name] = validation_loss(output)
    rows = table(f"held-out loss after {arguments.steps} steps", ["run", "rate", "loss", "from AdamW in fp32"])
    for name, loss in losses.items():
        rows.add_row(name, f"{EVERY[name].rate * lr:g}", f"{loss:.4f}", f"{loss / losses[REFERENCE] - 1:+.1%}")
    from bigdit import log

    log.out.print(rows)
    if seeds := [losses[name] / losses[REFERENCE] - 1 for name in OTHER_SEEDS if name in losses]:
        log.out.print(f"other seeds: {max(map(abs, seeds)):.1%} at most, {statistics.fmean(map(abs, seeds)):.1%} mean")
    worse = {name for name, loss in losses.items() if loss > losses[REFERENCE] * (1 + WORSE)}
    return int(arguments.steps >= STEPS and worse != WRONG.keys() & losses.keys())


def _set(overrides: list[str]) -> list[str]:
    return [part for each in overrides for part in ("--set", each)]


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
