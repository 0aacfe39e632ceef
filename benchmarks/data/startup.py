"""How long two processes take from the command to their first step, and how long a step waits for its samples.

    python benchmarks/data/startup.py [--folder DIR] [--rounds N]

The demo's recipe (launch/recipes/digits.yaml: DeepSpeed's ZeRO-2 over two processes on CPUs) for one step, whose
metrics tell that it was done; once before, which compiles what DeepSpeed compiles once. Samples come through the
trainer's own stream, beside steps that last STEP_S and leave the processor alone, as on a card. Exit
status 1 where the median of either is above its limit.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from bigdit.config import load_run
from bigdit.dist import World
from bigdit.loader.order import Order
from bigdit.loader.stream import FeatureStream
from bigdit.report.tables import table
from bigdit.store import FeatureStore

ROOT = Path(__file__).parents[2]
BIGDIT = Path(sys.executable).parent / "bigdit"
RECIPE = ROOT / "launch/recipes/digits.yaml"
STEP_S, STEPS = 0.2, 50
START_S, WAIT = 15.0, 0.01
"""Seconds from the command to the first step, and the share of a step that it waits for samples: at most, in the
median."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the start of a training, and what its steps wait for samples.")
    parser.add_argument("--folder", type=Path, default=Path("demo/startup"), help="where everything is written")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not (folder / "digits").exists():
        _run(sys.executable, "launch/digits.py", folder / "digits")
    settings = [f"data.images={folder / 'digits'}", f"data.features={folder / 'features'}"]
    _run(BIGDIT, "extract", "--config", RECIPE, *_set(settings))
    starts = [seconds_to_first_step(folder / f"run-{time.time_ns()}", settings) for _ in range(arguments.rounds + 1)]
    waits = seconds_waited(settings)
    rows = table("start and samples", ["what", "median", "all"])
    said = ", ".join(f"{each:.1f}" for each in starts[1:])
    rows.add_row("to the first step, two processes", f"{statistics.median(starts[1:]):.1f} s", f"{said} s")
    share, most = statistics.median(waits) / STEP_S, max(waits) / STEP_S
    rows.add_row(f"waited for samples, of steps of {STEP_S} s", f"{share:.2%}", f"{most:.2%} at most")
    from bigdit import log

    log.out.print(rows)
    return int(statistics.median(starts[1:]) > START_S or share > WAIT)


def seconds_to_first_step(output: Path, settings: list[str]) -> float:
    """From the command to the metrics of the first step."""
    chosen = [*settings, f"output={output}", "train.steps=1", "train.warmup_steps=1", "train.checkpoint_every=1"]
    metrics, first = output / "metrics.jsonl", None
    began = time.perf_counter()
    command = [str(BIGDIT), "train", "--config", str(RECIPE), *_set(chosen)]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while running.poll() is None:
        if first is None and metrics.is_file() and metrics.stat().st_size:
            first = time.perf_counter() - began
        time.sleep(0.01)
    if running.returncode or first is None:
        raise SystemExit(f"the run ended with status {running.returncode}, and no step")
    return first


def seconds_waited(settings: list[str]) -> list[float]:
    """For the samples of each step after the first."""
    run = load_run(RECIPE, settings)
    store = FeatureStore.open(run.data.features, run.data.reader, run.data.remote_cache)
    size, seed = run.strategy.micro_batch_size, run.train.seed
    stream = FeatureStream(
        store,
        World(),
        Order(store.index.counts, store.index.shapes, size, seed),
        micro_batch_size=size,
        grad_accum_steps=1,
        seed=seed,
        caption_dropout=run.data.caption_dropout,
        read_ahead_steps=run.strategy.read_ahead_steps,
        threads=run.data.read_threads,
    )
    waits = []
    with closing(stream.steps(0, STEPS + 1)) as steps:
        next(steps)
        for _ in range(STEPS):
            time.sleep(STEP_S)
            began = time.perf_counter()
            next(steps)
            waits.append(time.perf_counter() - began)
    return waits


def _set(overrides: list[str]) -> list[str]:
    return [part for each in overrides for part in ("--set", each)]


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
