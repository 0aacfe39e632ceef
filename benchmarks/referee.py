"""The rehearsal against the emulated card, event by event: writes benchmarks/referee.md.

python benchmarks/referee.py [--part | --row MODEL GPU STRATEGY BLOCKS]

Rows are in referee_rows.py; `--part` runs those that cover each rule once and writes nothing, and `--row` shows one
with all its differences by operator (BLOCKS 0: whole). Answers of both sides are kept, each by what decides it: what
did not change is not run again, and a run that was interrupted goes on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from referee_report import Judged, is_equal, page, share
from referee_rows import PART, rows

from bigdit.bench.against_card import Against
from bigdit.bench.referee import Row, judge, lines
from bigdit.errors import UserError, guard, versions
from bigdit.files import write_text
from bigdit.rehearse.card_client import cuda_build, cuda_python

PAGE = Path(__file__).with_suffix(".md")


def main(arguments: list[str]) -> int:
    match arguments:
        case []:
            judged = followed(rows())
            write_text(PAGE, page(judged, _versions()))
            return int(any(isinstance(found, str) for _, found in judged))
        case ["--part"]:
            return int(any(isinstance(found, str) for _, found in followed(list(PART))))
        case ["--row", model, gpu, strategy, blocks] if blocks.isdigit():
            return show(Row(model, gpu, strategy, int(blocks)))
    raise UserError(f"{' '.join(arguments)!r} was asked; `--part`, `--row MODEL GPU STRATEGY BLOCKS`, or nothing")


def followed(asked: list[Row]) -> Judged:
    """All rows, in the order asked, with a line for each as it comes."""
    began, found = time.perf_counter(), dict[Row, Against | str]()
    for row, answer in judge(asked):
        found[row] = answer
        print(
            f"{len(found):4} of {len(asked)}, {time.perf_counter() - began:5.0f} s  {row.name}: {_said(answer)}",
            flush=True,
        )
    return [(row, found[row]) for row in asked]


def show(row: Row) -> int:
    """One row, with all of its differences."""
    print(row.name)
    ((_, found),) = judge([row])
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
