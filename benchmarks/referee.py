"""The rehearsal against the emulated card, event by event: writes benchmarks/referee.md.

python benchmarks/referee.py [--part | --row MODEL GPU STRATEGY BLOCKS [ranks]] [--expandable]

Rows are in refereed/rows.py; `--part` runs those that cover each rule once and writes nothing, and `--row` shows one
with all its differences by operator (BLOCKS 0: whole; `ranks`: with every process of the strategy). With `--expandable`
the allocator has expandable segments on both sides, as plans have it, and nothing is written. Answers of both
sides are kept, each by what decides it: what did not change is not run again, and a run that was interrupted goes on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bigdit.bench.against_card import Against
from bigdit.bench.referee import judge, lines
from refereed.report import is_equal, page, share
from refereed.rows import PART, Row, rows

from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.errors import UserError, guard, versions
from bigdit.files import write_text

PAGE = Path(__file__).with_suffix(".md")
EXPANDABLE = "--expandable"
_WRITTEN_EVERY = 20


def main(arguments: list[str]) -> int:
    expandable = EXPANDABLE in arguments
    match [each for each in arguments if each != EXPANDABLE]:
        case []:
            return followed(rows(), None if expandable else PAGE, expandable)
        case ["--part"]:
            return followed(list(PART), None, expandable)
        case ["--row", model, gpu, strategy, blocks, *ranks] if blocks.isdigit() and ranks in ([], ["ranks"]):
            return show(Row(model, gpu, strategy, int(blocks), bool(ranks)), expandable)
    raise UserError(
        f"{' '.join(arguments)!r} was asked; `--part`, `--row MODEL GPU STRATEGY BLOCKS [ranks]`, or nothing, and "
        f"{EXPANDABLE} with each"
    )


def followed(asked: list[Row], written: Path | None, expandable_segments: bool) -> int:
    """All rows, with a line for each as it comes; what is found so far is `written` now and then, and at the end."""
    began, found = time.perf_counter(), dict[Row, Against | str]()
    for row, answer in judge(asked, expandable_segments=expandable_segments):
        found[row] = answer
        took = time.perf_counter() - began
        print(f"{len(found):4} of {len(asked)}, {took:5.0f} s  {row.name}: {_said(answer)}", flush=True)
        if written is not None and (len(found) % _WRITTEN_EVERY == 0 or len(found) == len(asked)):
            write_text(written, page([(row, found[row]) for row in asked if row in found], len(asked), _versions()))
    return int(any(isinstance(answer, str) for answer in found.values()))


def show(row: Row, expandable_segments: bool) -> int:
    """One row, with all of its differences."""
    print(row.name)
    ((_, found),) = judge([row], expandable_segments=expandable_segments)
    if isinstance(found, str):
        print(found)
        return 1
    print(f"the allocator's replay of the card's events is {'' if found.allocator_exact else 'NOT '}the card's own")
    print(*lines(found), sep="\n")
    return 0


def _said(answer: Against | str) -> str:
    if isinstance(answer, str):
        return answer.splitlines()[0]
    reserved = max(share(phase, "reserved") for phase in answer.phases)
    allocated = max(share(phase, "allocated") for phase in answer.phases)
    return f"allocated {'equal' if is_equal(answer) else f'{allocated:.3%}'}, reserved {reserved:.2%}"


def _versions() -> str:
    installed = versions()
    libraries = ", ".join(f"{name} {installed[name]}" for name in ("deepspeed", "diffusers", "bitsandbytes", "torchao"))
    return f"Rehearsed with torch {installed['torch']}; on the card torch {cuda_build(cuda_python())}; {libraries}"


if __name__ == "__main__":
    sys.exit(guard(lambda: main(sys.argv[1:])))
