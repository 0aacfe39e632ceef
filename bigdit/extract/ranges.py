"""Which ranges an extraction works on: its split of the sources, and the next one that nobody has done.

Nothing is handed out by a server, and no lock is taken: the store says what is done and what is in hand. Two workers
that take the same range all the same do no harm: both write it whole under one name, on a CPU to the same byte.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bigdit.errors import UserError
from bigdit.store.lease import all_marks
from bigdit.store.part import part_name, part_path
from bigdit.store.schema import Range


def split(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    """The ranges that start in [start, end): any cover of the sources by splits does each precisely once."""
    return [each for each in ranges if start <= each[0] < end]


def parse_split(count: int, start: int | None, end: int | None, shard: str | None) -> Range:
    """The source indices [start, end) of `--start-index`, `--end-index` and `--shard k/n`, of `count` pictures.

    Raises UserError where they contradict one another or name nothing.
    """
    if shard is not None:
        if start is not None or end is not None:
            raise UserError("--shard: --start-index or --end-index was given too; give the one or the others")
        found = re.fullmatch(r"(\d+)/(\d+)", shard)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(f"--shard: k/n with k from 1 to n was expected, such as 1/4 to 4/4, and {shard} was found")
        k, n = int(found[1]), int(found[2])
        return count * (k - 1) // n, count * k // n
    first, last = start or 0, count if end is None else end
    if not 0 <= first < count:
        raise UserError(f"--start-index: {first} was asked, and the sources hold 0 to {count - 1}; choose one of these")
    if last <= first:
        raise UserError(f"--end-index: {last} was asked, and --start-index is {first}; it must be greater")
    return first, last


def missing(root: Path, ranges: Sequence[Range]) -> list[Range]:
    """Those whose part is not in the store, by one look at its folder."""
    try:
        done = set(os.listdir(root))
    except FileNotFoundError:
        return list(ranges)
    return [each for each in ranges if part_name(*each) not in done]


def pull(root: Path, ranges: Sequence[Range], generator: random.Random) -> Iterator[Range]:
    """The ranges that are not done, one after another, looked at when they are asked for.

    From a random place on, and from another wherever someone else's work is met: so extractions that know nothing
    of each other seldom meet. What others have in hand comes last, since they may have died.
    """
    left, held = missing(root, ranges), []
    while left:
        at = generator.randrange(len(left))
        while at < len(left):
            each = left.pop(at)
            path = part_path(root, *each)
            if path.exists():
                break
            if path.name in all_marks(root):
                held.append(each)
                break
            yield each
    generator.shuffle(held)
    yield from (each for each in held if not part_path(root, *each).exists())
