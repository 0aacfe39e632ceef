"""Published training memory beside an emulated GPU: writes benchmarks/published.md.

    python benchmarks/published.py [ID ...]

Each row of published.json is a published measurement, with its source and a grade of trust (A: instrumented, B:
reported with its settings, C: settings inferred, D: contradicted). It has the strategy that comes nearest to what was
run, or says why none does. It is a report: nothing in bigdit is fitted to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from pages import kept

from bigdit import catalog
from bigdit.catalog.encoders import online_encoders
from bigdit.config.strategy_text import parse_strategy
from bigdit.errors import UserError
from bigdit.memory.process import non_torch_memory_of
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.pool import WorkerError
from bigdit.units import GIB, MIB

HERE = Path(__file__).parent
# For sources that name no GPU: one with so much room that the allocator frees nothing.
CARDS = {
    "A100": "a100-80g-sxm",
    "H100": "h100-sxm",
    "4090": "rtx-4090",
    "4080": "rtx-4080",
    "5090": "rtx-5090",
    "H20": "h20",
}
HEAD = """# Published training memory beside an emulated GPU

Made by `python benchmarks/published.py` from `published.json`, which has the sources. In GiB; a
rounded GB is read as GiB, as the tools that print it count. *Reserved* is by torch's default allocator, on
a GPU without a limit. *Process* is within the GPU's memory, where the allocator frees its cache first, with
the least of context and NCCL. A report, not a target: nothing is fitted to it."""
UNITS = {"GiB": GIB, "GB": GIB, "GB (rounded)": GIB, "MB (MiB vs MB not stated)": MIB}


def main(wanted: list[str]) -> None:
    rows = json.loads((HERE / "published.json").read_text())
    lines, errors = [], defaultdict(list)
    for row in rows:
        if "strategy" in row and (not wanted or row["id"] in wanted):
            found = _predict(row)
            lines.append(_line(row, found))
            print(lines[-1], flush=True)
            error = _error(row, found)
            if error is not None and row["outcome"] == "measured":
                errors[row["source"].split("/blob")[0]].append((row["trust"], error))
    if not wanted:
        (HERE / "published.md").write_text(_document(rows, lines, errors))


def _predict(row: dict[str, Any]) -> dict[str, int] | str:
    """Bytes by metric, or why there are none."""
    try:
        model = catalog.model(row["model"])
        gpu = catalog.gpu(next((name for key, name in CARDS.items() if key in (row["gpu"] or "")), "h100-sxm"))
        strategy = parse_strategy([row["strategy"]])
        shape = _shape(model, row.get("resolution"), row.get("height"), row.get("width"), row.get("frames"))
        encoders = online_encoders(model, shape) if strategy.features == "online" else None
        request = StepRequest(model=model.spec, batch=shape, strategy=strategy, encoders=encoders)
        beside = non_torch_memory_of(strategy, gpu)
        with EmulatedGpus(gpu, 1, timeout_s=900, expandable_segments=False) as cards:
            wanted = cards.attempt(request)
            within = cards.attempt(request, gpu.usable_bytes - beside.high_bytes)
    except (UserError, WorkerError) as error:
        return str(error).splitlines()[-1]
    reserved = within.peak_reserved_bytes if within.ran else wanted.peak_reserved_bytes
    return {
        "allocated": wanted.peak_allocated_bytes,
        "reserved": wanted.peak_reserved_bytes,
        "process": reserved + beside.low_bytes,
        "usable": gpu.usable_bytes,
    }


def _shape(model: Any, resolution: int | None, height: int | None, width: int | None, frames: int | None) -> Any:
    if height is not None and width is not None:
        return catalog.batch_shape(model, (height, width), frames)
    return catalog.batch_shape(model, resolution)


def _metric(row: dict[str, Any]) -> str:
    return "reserved" if "reserved" in (row["metric"] or "") else "process"


def _error(row: dict[str, Any], found: dict[str, int] | str) -> float | None:
    if isinstance(found, str) or row["published"] is None:
        return None
    return found[_metric(row)] / float(row["published"] * UNITS[row["unit"]]) - 1


def _line(row: dict[str, Any], found: dict[str, int] | str) -> str:
    published = row["outcome"] if row["published"] is None else f"{row['published']} {row['unit'].split(' (')[0]}"
    if row["outcome"] == "upper-bound":
        published = f"≤ {published}"
    head = f"| {row['id']} | {row['trust']} | {row['model']} | `{row['strategy']}` | {published} |"
    if isinstance(found, str):
        return f"{head} not run: {found} | | | |"
    error = _error(row, found)
    verdict = "" if error is None else f"{error:+.0%}"
    if row["outcome"] == "upper-bound" and error is not None:
        verdict = "below, as said" if error <= 0 else f"{error:+.0%}"
    if row["outcome"] in ("OOM", "fits"):
        fits = found["process"] <= found["usable"]
        verdict = "as said" if fits == (row["outcome"] == "fits") else "**contradicts**"
    sizes = " | ".join(f"{found[name] / GIB:.2f}" for name in ("allocated", "reserved", "process"))
    return f"{head} {sizes} | {verdict} |"


def _document(rows: list[dict[str, Any]], lines: list[str], errors: dict[str, list[tuple[str, float]]]) -> str:
    scores = [
        f"| {source} | {len(found)} | {', '.join(sorted({trust for trust, _ in found}))} | "
        f"{statistics.median(abs(error) for _, error in found):.0%} | "
        f"{min(error for _, error in found):+.0%} to {max(error for _, error in found):+.0%} |"
        for source, found in errors.items()
    ]
    left_out = [f"| {row['id']} | {row['trust']} | {row['not_comparable']} |" for row in rows if "strategy" not in row]
    table = "| id | trust | model | strategy | published | allocated | reserved | process | off by |"
    parts = [HEAD, "", table, f"|{' --- |' * 9}", *lines]
    parts += ["", "## By source (rows with a measured figure)", ""]
    parts += ["| source | rows | trust | median error | range |", f"|{' --- |' * 5}", *scores]
    parts += ["", "## Not comparable", "", "| id | trust | why |", f"|{' --- |' * 3}", *left_out]
    return "\n".join([*parts, "", kept(HERE / "published.md", "## What makes the large misses")])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="ID")
    asked = parser.parse_args().wanted
    if unknown := {*asked} - {row["id"] for row in json.loads((HERE / "published.json").read_text())}:
        parser.error(f"no ID is called {', '.join(sorted(unknown))}")
    main(asked)
