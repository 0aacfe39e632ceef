"""The fake device and the emulated card, one last time side by side: writes benchmarks/one_card.md.

python -m refereed.one_card [--part]   # in benchmarks/

Each row of refereed/rows.py but those of every rank is recorded twice by the same recorder: on fake tensors, and on the
emulated card with its allocator's own history. Compared are, by phase, allocated bytes by category, and for the whole
run the work of operators, the collectives, the host's peak, its page-locked bytes and the bytes of a checkpoint.
Answers are kept in OUT (build/one_card), so that a run that was interrupted goes on. `--part` takes the rows that cover
each rule once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bigdit.rehearse.card.client import Profiler, cuda_build, cuda_python
from bigdit.rehearse.pool import Pool

from bigdit import catalog
from bigdit.errors import UserError, guard, versions
from bigdit.files import write_text
from bigdit.memory.host import host_memory
from bigdit.profile.lanes import WorkerError
from bigdit.profile.request import RehearsedSize
from refereed.rows import PART, Row, rows

PAGE = Path(__file__).parents[1] / "one_card.md"
OUT = Path(__file__).parents[2] / "build/one_card"
PARTS = ("allocated", "categories", "work", "collectives", "host", "checkpoint")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="store_true")
    options = parser.parse_args()
    asked = [row for row in (PART if options.part else rows()) if not row.ranks]
    found = dict(compared(asked))
    if not options.part:
        write_text(PAGE, page(found))
    return int(any("error" in each for each in found.values()))


def compared(asked: list[Row]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row with what differs, or with why it was not answered."""
    began = time.perf_counter()
    OUT.mkdir(parents=True, exist_ok=True)
    with Pool(1) as pool, ThreadPoolExecutor(1) as aside:
        for gpu in dict.fromkeys(row.gpu for row in asked):
            with Profiler(catalog.resolve_gpu(gpu)) as profiler:
                for row in (row for row in asked if row.gpu == gpu):
                    kept = OUT / f"{row.name.replace('/', '_')}.json"
                    if not kept.exists():
                        answer = _answer(row, profiler, pool, aside)
                        write_text(kept, json.dumps(answer))
                        print(f"{time.perf_counter() - began:5.0f} s  {row.name}: {_line(answer)}", flush=True)
                    yield row, json.loads(kept.read_text())


def _answer(row: Row, profiler: Profiler, pool: Pool, aside: ThreadPoolExecutor) -> dict[str, Any]:
    try:
        request, _ = row.question()
        rehearsal = aside.submit(pool.rehearse, [request])
        try:
            card = profiler.run(request)
        finally:
            (fake,) = rehearsal.result()
        if isinstance(fake, UserError):
            return {"error": f"rehearsal: {fake}"}
        return difference(fake, card)
    except (UserError, WorkerError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def difference(fake: RehearsedSize, card: RehearsedSize) -> dict[str, Any]:
    """By part, what the two have otherwise: fake device first. A part that is equal is left out."""
    found: dict[str, Any] = defaultdict(dict)
    for ours, theirs in zip(fake.ledger.phases, card.ledger.phases, strict=True):
        if ours.peak_bytes != theirs.peak_bytes:
            found["allocated"][ours.phase] = [ours.peak_bytes, theirs.peak_bytes]
        for category in dict.fromkeys([*ours.at_peak, *theirs.at_peak]):
            pair = [ours.at_peak.get(category, 0), theirs.at_peak.get(category, 0)]
            if pair[0] != pair[1]:
                found["categories"][f"{ours.phase}: {category}"] = pair
    for name, value in {"work": _work, "collectives": _collectives, "host": _host, "checkpoint": _checkpoint}.items():
        ours, theirs = value(fake), value(card)
        for key in sorted({*ours, *theirs}):
            if ours.get(key) != theirs.get(key):
                found[name][key] = [ours.get(key), theirs.get(key)]
    if "allocated" in found:
        found["operators"] = _workspaces(card)
    return dict(found)


def _work(size: RehearsedSize) -> dict[str, Any]:
    """Calls, FLOPs and bytes by operator, dtype and place, over both steps; in place or not."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for cost in size.timeline.operators:
        for i, value in enumerate((cost.calls, cost.flops, cost.nbytes)):
            sums[f"{cost.operator.rstrip('_')} {cost.dtype} {cost.place}"][i] += value
    return dict(sums)


def _collectives(size: RehearsedSize) -> dict[str, Any]:
    return dict(Counter(f"{each.name} of {each.nbytes} B over {each.group_size}" for each in size.timeline.collectives))


def _host(size: RehearsedSize) -> dict[str, Any]:
    return host_memory(size.host_timeline).model_dump()


def _checkpoint(size: RehearsedSize) -> dict[str, Any]:
    return {"bytes": size.checkpoint_bytes}


def _workspaces(size: RehearsedSize) -> dict[str, int]:
    """The largest workspace of each operator on the card, in bytes."""
    largest: dict[str, int] = {}
    for block in size.timeline.blocks:
        if block.category == "workspace":
            largest[block.label] = max(largest.get(block.label, 0), block.nbytes)
    return largest


def _line(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return answer["error"].splitlines()[0][:200]
    return ", ".join(f"{part}: {len(answer[part])} differ" for part in PARTS if part in answer) or "equal"


def page(found: dict[Row, dict[str, Any]]) -> str:
    """The table of all rows, and what differs in each."""
    answered = {row: each for row, each in found.items() if "error" not in each}
    installed = versions()
    lines = [
        "# The fake device and the emulated card, side by side",
        "",
        "`python -m refereed.one_card` in benchmarks/ writes this page. The same recorder watched the same two steps",
        "on both. On the card the allocator's own history adds what kernels take within operators. There the",
        "categories of each phase sum to torch's own peak, or the run ends with an error.",
        "",
        f"Fake device: torch {installed['torch']}; emulated card: torch {cuda_build(cuda_python())}; "
        f"diffusers {installed['diffusers']}, DeepSpeed {installed['deepspeed']}. {len(answered)} of {len(found)} rows "
        "were answered by both.",
        "",
        "| part | rows that are equal | rows that differ |",
        "| --- | --- | --- |",
    ]
    for part in PARTS:
        differ = sum(part in each for each in answered.values())
        lines.append(f"| {part} | {len(answered) - differ} | {differ} |")
    lines += ["", "## Rows that differ", "", "Fake device → emulated card, in bytes.", ""]
    for row, each in answered.items():
        if parts := [part for part in PARTS if part in each]:
            lines.append(f"- {row.name}")
            for part in parts:
                listed = [f"{key} {pair[0]} → {pair[1]}" for key, pair in list(each[part].items())[:4]]
                more = f" and {len(each[part]) - 4} more" if len(each[part]) > 4 else ""
                lines.append(f"    - {part}: {'; '.join(listed)}{more}")
    if unanswered := {row: each for row, each in found.items() if "error" in each}:
        lines += ["", "## Rows without an answer", ""]
        lines += [f"- {row.name}: {each['error'].splitlines()[0]}" for row, each in unanswered.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(guard(main))
