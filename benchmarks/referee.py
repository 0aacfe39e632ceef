"""The rehearsal against the emulated card, event by event: writes benchmarks/referee.md.

python benchmarks/referee.py [--part | --row MODEL GPU STRATEGY BLOCKS]

Rows are in referee_rows.py; `--part` runs those that cover each rule once, and `--row` shows one, all its differences
by operator (BLOCKS 0: whole). Answers are kept, each by what decides it: what did not change is not run again.
"""

from __future__ import annotations

import sys

from bigdit.bench.referee import Row, judge, lines
from bigdit.errors import UserError, guard


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--row"] and len(arguments) == 5:
        return show(Row(*arguments[1:4], blocks=int(arguments[4])))
    raise UserError(f"{' '.join(arguments) or 'nothing'} was asked; see the first lines of benchmarks/referee.py")


def show(row: Row) -> int:
    print(row.name)
    ((_, found),) = judge([row])
    if isinstance(found, str):
        print(found)
        return 1
    print(f"the allocator's replay of the card's events is {'' if found.allocator_exact else 'NOT '}the card's own")
    print(*lines(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(guard(lambda: main(sys.argv[1:])))
