"""Extractions that are killed, signalled, doubled and damaged, and the same command again until the store is whole."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

from chaotic import moments
from chaotic.checks import check_said, end_of, end_well
from chaotic.damage import damaged
from chaotic.processes import LIMIT_S, ChaosError, Door, children, go_on, none_left, send, stop_all, tree
from chaotic.seen import AFTER, Seen
from chaotic.world import PICTURES, World, copied

_SIGNALS = {"`kill -9`": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}


class Attempt:
    """An extraction that runs until its moment."""

    def __init__(self, world: World, root: Path, draw: random.Random) -> None:
        number = len(list(root.parent.glob("*.log")))
        self.root, self._said = root, root.parent / f"{number}.said"
        in_time = draw.random() < 0.3
        self._seconds = draw.uniform(0, 1.5 * world.store.seconds) if in_time else None
        operation = 10**9 if in_time else draw.randint(1, world.store.operations)
        moment = moments.Moment(root, self._said, operation)
        self.door = Door(world.extracting(root), root.parent / f"{number}.log", moment)

    def until_its_moment(self) -> tuple[str, int] | None:
        """Stop all of its processes there; where it was and the process that came to it. None where it has ended."""
        began = time.monotonic()
        while self.door.status() is None:
            rows = moments.said(self._said)
            late = self._seconds is not None and time.monotonic() > began + self._seconds
            if rows or late:
                stop_all(rows[0][0] if rows else None)
                pid, event, path = rows[0] if rows else (self.door.pid, "", "")
                return (_place(event, path, pid == self.door.pid) if rows else self._where()), pid
            if time.monotonic() > began + LIMIT_S:
                raise ChaosError(f"nothing happened within {LIMIT_S:g} s: {self.door.text()[-2000:]}")
            time.sleep(0.0005)
        return None

    def _where(self) -> str:
        if list((self.root / "workers").glob("*/part-*")):
            return "while it encodes or writes a part"
        return "while it starts or ends"


def _place(event: str, path: str, main: bool) -> str:
    if main:
        return "while it prepares or reports"
    return "while it encodes or writes a part" if "part-" in path else "while a worker starts or ends"


def ended_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """Killed or signalled, again and again."""
    name, signum = draw.choice(list(_SIGNALS.items()))
    whom = draw.choice(["a worker", "all processes", "the command"]) if name == "`kill -9`" else "the command"
    whom = "all processes" if name == "Ctrl-C" else whom  # as a terminal sends it
    seen, root = Seen(f"extraction: {name} to {whom}"), folder / "features"
    before: set[str] = set()
    for _ in range(draw.choice([1, 1, 2, 3])):
        attempt = Attempt(world, root, draw)
        found = attempt.until_its_moment()
        if found is not None:
            workers = [pid for pid in tree() if pid != attempt.door.pid]
            victims = {
                "a worker": [found[1] if found[1] in workers else draw.choice(workers or [attempt.door.pid])],
                "all processes": [attempt.door.pid, *workers],
                "the command": [attempt.door.pid],
            }[whom]
            for pid in victims:
                send(pid, signum)
            go_on()
        status = end_of(attempt.door)
        seen.landed[found[0] if found else AFTER] += 1
        if status not in (0, 1, -signum, 128 + signum):
            raise ChaosError(f"ended with {status}: {attempt.door.text()[-2000:]}")
        check_said(attempt.door, refused=status == 1)
        before = check_parts(world, root, before)
    return comes_through(world, root, seen)


def twice_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """Two at once, or one that is stopped in its middle and goes on when another has done its work."""
    root, hangs = folder / "features", draw.random() < 0.5
    seen = Seen("two extractions of one store at once" if not hangs else "an extraction hangs, another does its work")
    attempt = Attempt(world, root, draw)
    if hangs:
        found = attempt.until_its_moment()
        seen.landed[found[0] if found else AFTER] += 1
    second = Door(world.extracting(root), folder / "second.log")
    until = time.monotonic() + LIMIT_S
    while (second.status() is None or (not hangs and attempt.door.status() is None)) and time.monotonic() < until:
        if not hangs:
            go_on()
        time.sleep(0.01)
    go_on()
    for door in (attempt.door, second):
        status = door.ends()
        check_said(door, refused=False)
        if status != 0:
            raise ChaosError(f"one of two ended with {status}: {door.text()[-2000:]}")
    none_left(30)
    seen.ended["both ended well"] += 1
    return comes_through(world, root, seen)


def damaged_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """A store that is not whole, with a damaged file beside its parts."""
    root = copied(world.store.root, folder / "features")
    (root / "report.json").unlink()
    for name in draw.sample(sorted(world.store.parts), 4):
        (root / name).unlink()
    others = [file for file in root.rglob("*") if file.is_file() and not file.name.startswith("part-")]
    file = draw.choice(sorted(others))
    whole = file.read_bytes()
    name = file.name if file.parent == root else file.parent.name
    seen = Seen(f"an unfinished store's {name} damaged")
    seen.landed[damaged(file, draw, sorted(others))] += 1
    door = Door(world.extracting(root), folder / "0.log")
    status = end_of(door)
    check_said(door, refused=status != 0)
    if status == 1:
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        file.unlink(missing_ok=True)
        file.write_bytes(whole)
        seen.ended["refused in a line; with the file brought back"] += 1
    elif status:
        raise ChaosError(f"ended with {status}: {door.text()[-2000:]}")
    return comes_through(world, root, seen, parts_alone=True)


def check_parts(world: World, root: Path, before: set[str]) -> set[str]:
    """Every visible part is whole and right, and none is gone; their names."""
    if children():
        raise ChaosError("processes were left behind")
    parts = {file.name: file.read_bytes() for file in root.glob("part-*")}
    wrong = [name for name, content in parts.items() if world.store.files.get(name) != content]
    if wrong or before - parts.keys():
        raise ChaosError(f"wrong parts: {wrong}; lost parts: {before - parts.keys()}")
    return set(parts)


def comes_through(world: World, root: Path, seen: Seen, *, parts_alone: bool = False) -> Seen:
    """The same command ends well, and with it the round. Raises ChaosError where it does not, or anything differs."""
    door = Door(world.extracting(root), root.parent / "last.log")
    end_well(door)
    if check_parts(world, root, set()) != world.store.parts.keys():
        raise ChaosError(f"the same command left parts out: {door.text()[-2000:]}")
    null = (root / "null_text.safetensors").read_bytes()
    if not parts_alone and null != world.store.files["null_text.safetensors"]:
        raise ChaosError("the empty caption is not what an undisturbed extraction has")
    report = json.loads((root / "report.json").read_text())
    if (report["pictures"], report["encoded"], len(report["skipped"])) != (PICTURES, PICTURES - 1, 1):
        raise ChaosError(f"the report says {report}")
    left = [str(file.relative_to(root)) for file in (root / "workers").rglob("*")]
    left += [str(file.relative_to(root)) for file in root.rglob(".tmp-*")]
    if left:
        raise ChaosError(f"left behind: {left}")
    seen.ended["done again, every part equal to the byte"] += 1
    shutil.rmtree(root)
    return seen
