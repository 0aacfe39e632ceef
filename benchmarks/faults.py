"""What faults do to an extraction: workers killed, bits flipped, files cut, a full disk, clocks set, a node gone.

    python benchmarks/faults.py [--rounds 200] [--seed 0]

Writes its section of faults.md beside this file, and ends with an error at the first round that does not come out
right. The tests run the same rounds, fewer of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from faulty.case import COUNT, Case, make_case
from faulty.damage import can_mount, cut_rounds, flip_rounds, full_disk_round
from faulty.kills import kill_all_round, kill_round
from faulty.page import write_section
from faulty.shared import clock_round, hung_round, two_at_once_round, vanished_round

from bigdit import libraries, log
from bigdit.units import duration

FLIPS, CUTS = 2000, 300


Row = tuple[str, int, str]
"""A fault, its rounds, what was seen."""


def main() -> None:
    libraries.prepare()
    parser = argparse.ArgumentParser(description="Disturb extractions, and see that nothing is lost or half there.")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of kill -9 of workers")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    log.err.quiet = True  # hundreds of progress bars
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(Path(folder))
        for row in rounds(case, arguments.rounds, arguments.seed):
            print(" | ".join(map(str, row)), flush=True)
            rows.append(row)
    command = f"python benchmarks/faults.py --rounds {arguments.rounds} --seed {arguments.seed}"
    section = _section(case, rows, command, time.perf_counter() - began)
    write_section(Path(__file__).parent / "faults.md", "Extraction", section)


def rounds(case: Case, count: int, seed: int) -> Iterator[Row]:
    """All faults, one after another."""
    seeds = range(seed, seed + max(count // 40, 1))  # these start whole extractions, which takes seconds
    yield _killed(case, range(seed, seed + count))
    attempts = [kill_all_round(case, each) for each in seeds]
    yield (
        "`kill -9` of whole extractions, every other time without their workers",
        len(attempts),
        f"{statistics.mean(attempts):.1f} attempts a round, {max(attempts)} at most",
    )
    twice = [two_at_once_round(case, f"two-{each}") for each in seeds]
    yield (
        "two extractions of one empty store at once, that know nothing of each other",
        len(twice),
        f"{statistics.mean(twice):.2f} of {len(case.parts)} parts a round were encoded by both, {max(twice)} at most",
    )
    for fault, disturb in (
        ("an extraction stopped (SIGSTOP) in its middle, its work done by another, then let go on", hung_round),
        ("all files' times set to 1980 and 2100 by turns, workers killed; the clock was left alone", clock_round),
        ("half-written parts in the hands of a machine that is gone", vanished_round),
    ):
        for each in seeds:
            disturb(case, each)
        yield fault, len(seeds), "as above"
    flipped = flip_rounds(case, seed, FLIPS)
    yield (
        "one random bit of a random part flipped",
        flipped.made,
        f"{flipped.verified} found by `bigdit features verify`; {flipped.read} found when training reads, the other "
        f"{flipped.unread} in what it never reads (captions as text): its values were right",
    )
    cut = cut_rounds(case, seed, CUTS)
    yield (
        "a random part cut at a random byte, or made longer",
        cut.made,
        f"{cut.verified} found by `bigdit features verify`, {cut.read} when training reads",
    )
    yield _full(case, seeds)


def _killed(case: Case, seeds: range) -> Row:
    where: Counter[str] = Counter()
    attempts = []
    for each in seeds:
        killed, tries = kill_round(case, each)
        where.update(killed)
        attempts.append(tries)
        if len(attempts) % 10 == 0:
            print(f"{len(attempts)} rounds, {where.total()} kills", file=sys.stderr)
    places = ", ".join(f"{number} {place}" for place, number in where.most_common())
    tries = f"{statistics.mean(attempts):.1f} attempts a round, {max(attempts)} at most"
    return "`kill -9` of random workers at random moments", len(seeds), f"{where.total()} kills ({places}); {tries}"


def _full(case: Case, seeds: range) -> Row:
    what = "a tmpfs that is full in the middle, then given room"
    if not can_mount(case.folder / "mount"):
        return what, 0, "this process may not mount file systems: not tried (tests/extract limits file sizes)"
    ends = Counter(full_disk_round(case, each).rpartition(": ")[2] for each in seeds)
    return what, len(seeds), ", ".join(f"{count} ended with “{end}”" for end, count in ends.items())


def _section(case: Case, rows: Sequence[Row], command: str, seconds: float) -> list[str]:
    return [
        f"`{command}`: {duration(seconds)} on {os.cpu_count()} cores. Each round extracts {COUNT} pictures, one of",
        f"them damaged, into a store of {len(case.parts)} parts, by two workers, again after each fault, until it",
        "is whole. Then each part equals, byte for byte, that of an undisturbed extraction, every id is",
        "there precisely once, and nothing of the dead is left. After each fault every visible part is whole.",
        "",
        "| fault | rounds | what was seen |",
        "| --- | --- | --- |",
        *(f"| {fault} | {count} | {seen} |" for fault, count, seen in rows),
    ]


if __name__ == "__main__":
    main()
