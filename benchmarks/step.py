"""Whether a run's step takes longer than that of a bare PyTorch loop with the same model, values and optimizer.

    python benchmarks/step.py [--folder DIR] [--rounds N] [--samples N]

It runs `bigdit bench step` of the demo's recipe (launch/recipes/digits.yaml) in one process, interleaved with the
plain loop, in micro-batches of this many samples, two a step. The exit status is 1 if the median ratio of the rounds
is above LIMIT, or if a step takes less than STEP_S: a fixed cost would then be too large a part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bigdit import log
from bigdit.bench import Comparison
from bigdit.report.bench import comparison_table, load_line, overhead, print_notes

ROOT = Path(__file__).parents[1]
BIGDIT = Path(sys.executable).parent / "bigdit"
RECIPE = ROOT / "launch/recipes/digits.yaml"
STEP_S, LIMIT = 0.2, 1.02
"""The least seconds of a plain step, and the largest ratio of the run's to it, both as medians."""


def main(asked: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Hold the run's step against a plain PyTorch loop's.")
    parser.add_argument("--folder", type=Path, default=Path("demo/step"), help="where everything is written")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--samples", type=int, default=96, help="a micro-batch, of two a step")
    arguments = parser.parse_args(asked)
    compared = compare(arguments.folder.resolve(), arguments.rounds, arguments.samples)
    plain, own = compared.contenders
    assert own.of_baseline is not None  # the plain loop has none
    log.out.print(load_line(compared.load), highlight=False)
    log.out.print(comparison_table(compared))
    log.out.print(f"overhead: {overhead(own.of_baseline)}; limit {100 * (LIMIT - 1):.0f} %", highlight=False)
    print_notes(compared)
    if plain.seconds.median < STEP_S:
        log.out.print(f"steps of {plain.seconds.median:.3f} s are too short; raise --samples", highlight=False)
    return int(own.of_baseline.median > LIMIT or plain.seconds.median < STEP_S)


def compare(folder: Path, rounds: int, samples: int) -> Comparison:
    """Time the two loops, interleaved, on the digits in `folder`."""
    settings = [
        *(f"data.images={folder / 'digits'}", f"data.features={folder / 'features'}"),
        *(f"strategy.micro_batch_size={samples}", f"strategy.global_batch_size={2 * samples}"),
    ]
    config = ["--config", str(RECIPE), *(part for each in settings for part in ("--set", each))]
    if not (folder / "digits").exists():
        _run(sys.executable, "launch/digits.py", folder / "digits")
    _run(BIGDIT, "extract", *config)
    steps = str(rounds + 2)  # the first two are not timed
    said = _run(BIGDIT, "bench", "step", *config, "--steps", steps, "--out", folder / "receipt.json", "--json")
    return Comparison.model_validate(json.loads(said)["compared"])


def _run(*command: str | Path) -> str:
    said = [str(part) for part in command]
    return subprocess.run(said, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
