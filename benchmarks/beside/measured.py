"""A row on its emulated card: both sides at a batch of one, and the largest batch that each side trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beside import ours, theirs
from beside.counted import memory, passes_gib, work
from bigdit import catalog
from bigdit.emulator import emulated_environment
from bigdit.emulator.fake_weights import lay_out
from bigdit.units import GIB

OURS = "bigdit"
STEPS = 12
"""Ten of which are counted, as often as bigdit writes its metrics."""

FEWEST = 2
"""Steps that show whether a batch fits: optimizer state is made in the first."""


MOST = 512
"""Samples."""


class Row:
    """The sides of a row of rows.json. `pythons` run the scripts of `projects`, by their environments; all that is made
    lies in `folder`."""

    def __init__(
        self, document: dict[str, Any], row: dict[str, Any], projects: Path, pythons: dict[str, str], folder: Path
    ) -> None:
        self._document, self._row, self._folder = document, row, folder
        self._python = pythons[row["environment"]]
        self._scripts = projects / row["project"] / row["folder"]
        gpu = catalog.resolve_gpu(row["gpu"])
        self._usable_gib = gpu.usable_bytes / GIB
        self._hub = lay_out([row["repository"]], folder, os.environ | emulated_environment(gpu))
        theirs.make_pictures(folder / "data", ours.SIZE)

    def side(self, way: str, known: int | None) -> dict[str, Any]:
        """What a step of one sample takes, and the largest batch where the row asks for it; or the error.

        `known`: the largest that was found before.
        """
        report = self._run(way, 1, STEPS)
        if not report["fits"] or report["exit_status"]:
            return {"failed": _error(report)}
        found = memory(report) | work(report, STEPS)
        if "largest" in self._row["asked"]:
            found |= largest(lambda batch: self._passes_gib(way, batch), passes_gib(report), self._usable_gib, known)
        return found

    def _passes_gib(self, way: str, batch: int) -> float | None:
        """GiB of the passes of a few steps; None where these run out. Raises Refused where they fail otherwise."""
        report = self._run(way, batch, FEWEST)
        if not report["fits"] or ours.took_less(self._made(way, batch, FEWEST)):
            return None
        if report["exit_status"]:
            raise Refused(_error(report))
        return passes_gib(report)

    def _made(self, way: str, batch: int, steps: int) -> Path:
        """The folder for what a run writes."""
        return self._folder / f"{way.replace(' ', '-')}-{batch}-{steps}"

    def _run(self, way: str, batch: int, steps: int) -> dict[str, Any]:
        """The report of `bigdit emulate`."""
        environment, out = os.environ | self._hub, self._made(way, batch, steps)
        emulate = [str(Path(sys.executable).with_name("bigdit")), "emulate", "--gpu", self._row["gpu"], "--json"]
        if way == OURS:
            (weights,) = Path(self._hub["HF_HUB_CACHE"]).glob("models--*/snapshots/*")
            command = ours.command(self._row, batch, steps, weights, out)
            environment["PYTHONPATH"] = str(ours.ROOT)
        else:
            places = {"data": self._folder / "data", "out": out, "batch": batch, "steps": steps + 1}
            command = [self._python, *theirs.command(self._document, self._row, way, **places)]
            emulate += ["--steps", str(steps)]
        done = subprocess.run([*emulate, "--", *command], cwd=self._scripts, env=environment, capture_output=True)
        (self._folder / f"{out.name}.err").write_bytes(done.stderr)
        return json.loads(done.stdout)


class Refused(Exception):
    """A side that fails at a batch, and not for want of memory."""


def largest(passes: Callable[[int], float | None], one: float, usable_gib: float, known: int | None) -> dict[str, Any]:
    """The largest batch that fits where one more does not.

    `passes`: GiB of forward and backward passes by the batch, None where it runs out; `one`: of one sample. Tried is
    first what is `known`, and one more; then where the line through the two largest that fit ends, and the middle where
    that is known not to fit. At few samples passes may not grow, where the gradients of all weights are more than what
    is kept of them: then twice as many are tried.
    """
    fits, held, fails, grows = 1, one, MOST + 1, 0.0
    likely = [2] if known is None else [known, known + 1]
    try:
        while fits + 1 < fails:
            line = fits + max(1, int((usable_gib - held) / grows)) if grows > 0 else 2 * fits
            likely = [batch for batch in likely if fits < batch < fails]
            at = likely.pop(0) if likely else line if line < fails else (fits + fails) // 2
            taken = passes(at)
            if taken is None:
                fails = at
            else:
                grows = (taken - held) / (at - fits)
                fits, held = at, taken
    except Refused as error:
        return {"largest": fits, "why": str(error)}
    return {"largest": fits}


def _error(report: dict[str, Any]) -> str:
    errors = [account["error"] for run in report["runs"] for account in run["accounts"] if account["error"]]
    return f"{errors[0]['type']}: {errors[0]['text'].splitlines()[0]}" if errors else f"status {report['exit_status']}"
