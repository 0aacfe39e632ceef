"""Claims about training memory and time, answered by plans and emulated steps: writes benchmarks/scenarios.md.

python benchmarks/scenarios.py [NUMBER ...]

Answers are cached, so that the command continues where it was interrupted. With numbers it answers and prints those
cases alone, and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from claims import dit, pixart, sana
from claims.answers import Case

FILE = Path(__file__).parent / "scenarios.md"

CASES = (
    sana.came_on_sana,
    sana.sana_cached,
    dit.dit_batches,
    pixart.pixart_batch_20,
    pixart.pixart_days,
    dit.half_precision,
    sana.sana_waterfall,
)

HEAD = """# Claims, and what the planner says

Made by `python benchmarks/scenarios.py`: each answer is a plan, or two steps on an emulated GPU. *Process* is the most
that nvidia-smi would show. FITS leaves room for all that is not known, and TIGHT for the least of it."""


def main(wanted: list[int]) -> None:
    """Answer the cases, all or by number."""
    parts = [HEAD]
    for number, answer in enumerate(CASES, 1):
        if wanted and number not in wanted:
            continue
        began = time.perf_counter()
        _say(f"case {number}")
        parts.append(_section(number, answer(_say)))
        _say(f"case {number}: {time.perf_counter() - began:.0f} s")
        if wanted:
            print(parts[-1], flush=True)
    if not wanted:
        FILE.write_text("\n\n".join(parts) + "\n")


def _section(number: int, case: Case) -> str:
    head, *rows = case.rows
    table = [head, ["---"] * len(head), *rows]
    return "\n".join(
        [
            f"## {number}. {case.title}",
            "",
            f"Claim: {case.claim}",
            "",
            *(f"| {' | '.join(row)} |" for row in table),
            "",
            *(f"- {line}" for line in case.why),
        ]
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", type=int, nargs="*", metavar="NUMBER")
    main(parser.parse_args().wanted)
