"""Show the whole way: plan, write images, extract, train on emulated GPUs and on the CPU, sample, and read the samples.

Every step is a command that a user types. Each is shown before it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import digits
import numpy as np
from PIL import Image

from bigdit import catalog, libraries, log
from bigdit.checkpoint import latest
from bigdit.emulator.interpreter import cuda_python
from bigdit.files import write_json, write_text
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.report.tables import table
from bigdit.store import FeatureStore
from bigdit.strategy import ModelSpec, Strategy
from bigdit.train.data import largest_batch_shape
from bigdit.train.processes.launch import free_port
from bigdit.units import duration, gib

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
FOLDER = Path("demo")  # as the recipe says
RECIPE = "launch/recipes/digits.yaml"
SAMPLES = 100
STEPS = 7
GUIDANCE = "2"
GPU = "a40"


class Demo:
    """Runs commands in the repository's root, and keeps their times for the closing table."""

    def __init__(self, folder: Path, extra: list[str]) -> None:
        self.folder = folder
        self.took: dict[str, float] = {}
        places = {"data.images": "digits", "data.features": "features", "output": "run"}
        moved = [f"{key}={folder / name}" for key, name in places.items()] if folder != FOLDER else []
        self.overrides = [*moved, *extra]
        self.config = ["--config", RECIPE, *(part for override in self.overrides for part in ("--set", override))]

    def run(self, what: str, *command: str) -> None:
        """Show and run one command. If it fails, the demo ends with its exit status."""
        log.err.rule(f"[bold]{len(self.took) + 1} of {STEPS}: {what}[/bold]", align="left")
        log.err.print(f"$ {shlex.join(command)}", style="dim", soft_wrap=True, highlight=False)
        began = time.perf_counter()
        environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if status != 0:
            sys.exit(status)
        self.took[what] = time.perf_counter() - began

    def read(self, name: str) -> Any:
        """Read a command's JSON report."""
        return json.loads((self.folder / name).read_text())


def main() -> None:
    libraries.prepare()
    parser = argparse.ArgumentParser(description="Plan, extract, train and sample, end to end.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where everything is written")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    arguments = parser.parse_args()
    demo = Demo(arguments.folder, arguments.set)

    demo.run("plan", "bigdit", "plan", "--model", "sana-1600m", "--gpu", GPU)
    demo.run("images", sys.executable, "launch/digits.py", str(demo.folder / "digits"))
    demo.run("extract", "bigdit", "extract", *demo.config)
    _emulate(demo)
    demo.run(
        "train",
        *(
            "deepspeed",
            "--log_level",
            "warning",
            "--num_gpus",
            "2",
            "--master_port",
            str(free_port()),
            "launch/train.py",
        ),
        *("--ds-config", "ds_configs/zero2.json", *demo.config),
    )
    grid = _sample(demo)
    right = _read_samples(demo.folder / "samples")
    _report(demo, grid, right)


def _emulate(demo: Demo) -> None:
    """Train the run's first steps on two emulated GPUs."""
    output = demo.folder / "emulated"
    shutil.rmtree(output, ignore_errors=True)  # left by an earlier demo
    launcher = f"{cuda_python()} -W ignore -m torch.distributed.run --standalone --nproc-per-node 2".split()
    few = {"output": output, "train.steps": 3, "train.checkpoint_every": 3, "train.warmup_steps": 0}
    others = [each for each in demo.overrides if each.partition("=")[0] not in few]
    sets = [part for override in (*others, *(f"{key}={few[key]}" for key in few)) for part in ("--set", override)]
    trained = ("launch/train.py", "--ds-config", "ds_configs/zero2.json", "--config", RECIPE, *sets)
    demo.run("emulate", "bigdit", "emulate", "--gpu", GPU, "--gpus", "2", "--", *launcher, *trained)


def _planned(demo: Demo) -> int:
    """Bytes that a plan says torch reserves for two steps of the run."""
    run, _ = latest(demo.folder / "emulated")
    assert run is not None
    request = StepRequest(
        model=ModelSpec.model_validate(run.state["model"]),
        batch=largest_batch_shape(FeatureStore.open(demo.folder / "features")),
        strategy=Strategy.model_validate(demo.read("emulated/receipt.json")["strategy"]),
    )
    with EmulatedGpus(catalog.gpu(GPU), 1, expandable_segments=False) as gpus:  # as the launcher sets it
        return gpus.attempt(request).peak_reserved_bytes


def _sample(demo: Demo) -> Path:
    """Sample a grid of the ten digits, and a hundred samples for the classifier."""
    command = ("bigdit", "sample", "--checkpoint", str(demo.folder / "run"), "--guidance", GUIDANCE, "--size", "8x8")
    for name, count in (("grid", len(digits.WORDS)), ("samples", SAMPLES)):
        captions = demo.folder / f"{name}.txt"
        write_text(captions, "".join(digits.caption(i % len(digits.WORDS)) + "\n" for i in range(count)))
        shutil.rmtree(demo.folder / name, ignore_errors=True)  # left by an earlier demo
        demo.run(f"sample {count}", *command, "--captions", str(captions), "--out", str(demo.folder / name))
    return demo.folder / "grid" / "grid.png"


def _read_samples(folder: Path) -> int:
    """How many samples an independent classifier reads as the requested digit."""
    rows = json.loads((folder / "samples.json").read_text())["images"]
    images = [np.asarray(Image.open(folder / row["file"])) for row in rows]
    asked = [digits.WORDS.index(row["caption"].split()[-1]) for row in rows]
    return sum(found == wanted for found, wanted in zip(digits.read_digits(images), asked, strict=True))


def _report(demo: Demo, grid: Path, right: int) -> None:
    emulated, receipt, extracted = (
        demo.read("emulated/receipt.json"),
        demo.read("run/receipt.json"),
        demo.read("features/report.json"),
    )
    log.out.rule("[bold]what ran[/bold]", align="left")
    rows = table("", ["step", "took", "result"], numeric=["took"])
    read = f"a classifier fitted on the real digits reads {right} right"
    results = {
        "plan": "sana-1600m on an A40 (above)",
        "images": str(demo.folder / "digits"),
        "extract": f"{extracted['encoded']} images, {demo.folder / 'features'}",
        "emulate": f"the first {emulated['steps']} steps of the training below, on two A40 that are not there",
        "train": f"{receipt['steps']} steps, {receipt['samples_per_second']:.0f} images/s, {demo.folder / 'run'}",
        f"sample {len(digits.WORDS)}": str(grid),
        f"sample {SAMPLES}": read,
    }
    for what, seconds in demo.took.items():
        rows.add_row(what, duration(seconds), results.get(what, ""))
    log.out.print(rows)

    memory = table("reserved by torch on each A40", ["planned", "taken", "off"], numeric=["planned", "taken"])
    planned, taken = _planned(demo), emulated["measured_peak_reserved_bytes"]
    memory.add_row(gib(planned), gib(taken), f"{planned - taken} bytes")
    log.out.print(memory)

    log.out.print(f"{read} of {SAMPLES}", highlight=False)
    log.out.print(f"the grid: {grid}", highlight=False, soft_wrap=True)
    log.out.print(f"the run's page: {demo.folder / 'run' / 'report.html'}", highlight=False, soft_wrap=True)
    log.out.print("next: `bigdit recipe` lists runs for your GPU, and docs/start.md continues here", highlight=False)
    write_json(
        demo.folder / "summary.json",
        {
            "read_right": right,
            "of": SAMPLES,
            "seconds": demo.took,
            "grid": str(grid),
            "planned": planned,
            "taken": taken,
        },
    )


if __name__ == "__main__":
    main()
