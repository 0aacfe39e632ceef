"""Chaos over whole runs: kills, signals, damaged files, full disks, two at once, on extraction and training.

    python benchmarks/chaos.py [--rounds 1000] [--seed 0] [--lanes 2] [--keep DIR] [--page FILE]
    python benchmarks/chaos.py --alone 417 502       # these seeds' rounds

A round is what its seed draws. It ends well where everything ends equal, to the bit, to a run that nobody disturbed,
where nothing that was whole is lost, and where what was damaged is said in a line. Writes its section of faults.md
beside this file, and ends with an error where a round does not end well. The tests run the same rounds, fewer of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: threads do not survive a fork

from chaotic import damage_rounds, disk_rounds, extract_rounds, moved_rounds, train_rounds
from chaotic.processes import ChaosError, adopt_orphans, kill_all, warm
from chaotic.seen import Seen
from chaotic.world import World
from faulty.page import write_section

from bigdit.units import duration

Round = Callable[[World, random.Random, Path], Seen]

ROUNDS: dict[str, tuple[Round, int]] = {
    "train killed": (train_rounds.killed_round, 260),
    "train signalled": (train_rounds.signalled_round, 150),
    "train twice": (train_rounds.twice_round, 30),
    "train elsewhere": (moved_rounds.elsewhere_round, 30),
    "train moved": (moved_rounds.moved_round, 40),
    "train from a shell": (moved_rounds.console_round, 10),
    "run damaged": (damage_rounds.run_round, 190),
    "store damaged": (damage_rounds.store_round, 70),
    "written damaged": (damage_rounds.written_round, 50),
    "train full": (disk_rounds.train_round, 40),
    "extract ended": (extract_rounds.ended_round, 80),
    "extract twice": (extract_rounds.twice_round, 20),
    "extract damaged": (extract_rounds.damaged_round, 20),
    "extract full": (disk_rounds.extract_round, 10),
}
"""By name, with how many of a thousand are drawn."""


_MEANING = """\
A round is drawn from its seed: what is disturbed, where, and how often. A process is killed or signalled before a file
operation of its own, or after a time. Then the same command runs again, and comes through: weights, optimizer state,
average, rows, exports and parts equal those of a run that nobody disturbed, to the bit (on another number of processes
within 1e-4), and nothing is left behind. After each disturbance every visible checkpoint, export and part is whole and
right, none is older than before, and what was said is what README states: a line, and no traceback. Processes are
forked from one that has imported torch, but those that a shell starts. Runs take 10 steps; they save every second one.
""".splitlines()


@dataclass(frozen=True)
class Result:
    """Of a round: what it saw, or the problem that it found."""

    seed: int
    name: str
    seconds: float
    seen: dict[str, Any] | None
    problem: str | None


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb whole runs, and see that nothing is lost or silent.")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next has the next")
    parser.add_argument("--alone", type=int, nargs="+", metavar="SEED", help="the rounds of these seeds, and no page")
    parser.add_argument("--lanes", type=int, default=len(os.sched_getaffinity(0)), help="rounds at a time, a core each")
    parser.add_argument("--keep", type=Path, help="a folder for what failed rounds leave, and for results.jsonl")
    parser.add_argument("--page", type=Path, default=Path(__file__).with_name("faults.md"), help="what is written")
    arguments = parser.parse_args()
    began = time.perf_counter()
    seeds = arguments.alone or range(arguments.seed, arguments.seed + arguments.rounds)
    results = []
    for result in rounds(seeds, arguments.lanes, arguments.keep):
        results.append(result)
        if arguments.keep is not None:
            with open(arguments.keep / "results.jsonl", "a") as log:
                log.write(json.dumps(vars(result)) + "\n")
        if result.problem:
            print(f"seed {result.seed}, {result.name}: {result.problem}", file=sys.stderr, flush=True)
        if len(results) % 20 == 0:
            print(f"{len(results)} rounds, {_failed(results)} failed", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    chosen = f"--rounds {arguments.rounds} --seed {arguments.seed}"
    if arguments.alone:
        chosen = f"--alone {' '.join(map(str, arguments.alone))}"
    command = f"python benchmarks/chaos.py {chosen}"
    section = _section(results, command, seconds)
    print("\n".join(section))
    if not arguments.alone and not _failed(results):
        write_section(arguments.page, "Whole runs", section)
    sys.exit(bool(_failed(results)))


def rounds(seeds: Sequence[int], lanes: int, keep: Path | None = None) -> Iterator[Result]:
    """The rounds of these seeds, as they end. A lane is a process on a core of its own, with a world of its own."""
    warm()
    cores = sorted(os.sched_getaffinity(0))
    hear, tell = os.pipe()
    pids = []
    for lane in range(lanes):
        pid = os.fork()
        if pid == 0:
            os.close(hear)
            os.sched_setaffinity(0, {cores[lane % len(cores)]})
            _lane(seeds[lane::lanes], keep, tell)
        pids.append(pid)
    os.close(tell)
    with open(hear) as lines:
        for line in lines:
            yield Result(**json.loads(line))
    for pid in pids:
        os.waitpid(pid, 0)


def _lane(seeds: Sequence[int], keep: Path | None, tell: int) -> None:
    """Rounds one after another, told as lines of JSON; never returns."""
    status = 1
    try:
        adopt_orphans()
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            os.environ["BIGDIT_RECEIPTS"] = f"{folder}/receipts"
            os.chdir(folder)
            world = World(Path(folder) / "world")
            for seed in seeds:
                result = _round(world, seed, Path(folder) / f"round-{seed}", keep)
                os.write(tell, (json.dumps(vars(result)) + "\n").encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _round(world: World, seed: int, folder: Path, keep: Path | None) -> Result:
    draw = random.Random(seed)
    name = draw.choices(list(ROUNDS), [weight for _, weight in ROUNDS.values()])[0]
    folder.mkdir()
    began = time.perf_counter()
    seen, problem = None, None
    try:
        found = ROUNDS[name][0](world, draw, folder)
        seen = {"fault": found.fault, "landed": found.landed, "ended": found.ended}
    except ChaosError as error:
        problem = str(error)
    except Exception:
        problem = traceback.format_exc()
    kill_all()
    if problem and keep is not None:
        shutil.copytree(folder, keep / folder.name, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(folder)
    return Result(seed, name, time.perf_counter() - began, seen, problem and problem[-4000:])


def _failed(results: Sequence[Result]) -> int:
    return sum(result.problem is not None for result in results)


def _section(results: Sequence[Result], command: str, seconds: float) -> list[str]:
    rows: dict[str, tuple[int, Counter[str], Counter[str]]] = {}
    for result in results:
        if result.seen is not None:
            count, landed, ended = rows.get(result.seen["fault"], (0, Counter(), Counter()))
            rows[result.seen["fault"]] = (
                count + 1,
                landed + Counter(result.seen["landed"]),
                ended + Counter(result.seen["ended"]),
            )
    table = sorted(rows.items())
    done = f"{len(results)} rounds, {_failed(results)} of them failed, in {duration(seconds)}"
    return [
        f"`{command}`: {done} on {os.cpu_count()} cores.",
        "",
        *_MEANING,
        *(() if os.geteuid() else ("It ran as root, who reads all files: none was made unreadable.",)),
        "",
        "| fault | rounds | what was damaged, or where it landed | how it ended |",
        "| --- | --- | --- | --- |",
        *(f"| {fault} | {count} | {_listed(landed)} | {_listed(ended)} |" for fault, (count, landed, ended) in table),
    ]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


if __name__ == "__main__":
    main()
