"""A training that is disturbed at a moment, and the same command again until it is done."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from bigdit.checkpoint.saver import kept_steps
from chaotic import moments
from chaotic.checks import STEPS, Course, check_safe, check_whole, end_of, end_well, rows_of, steps_of
from chaotic.processes import LIMIT_S, ChaosError, Door, children, send, stop_all, tree
from chaotic.seen import AFTER, Seen
from chaotic.world import TRAINED, World


class Attempt:
    """A training that runs until its moment: before a file operation of one of its processes, or after a time."""

    def __init__(self, world: World, course: Course, output: Path, draw: random.Random, *overrides: str) -> None:
        number = len(list(output.parent.glob("*.log")))
        self.output, self._said = output, output.parent / f"{number}.said"
        found = max(steps_of(output), default=0)
        operation, self.seconds = _when(course, draw, found)
        ranks = 2 if course.name in ("fsdp2", "zero2") else 1
        moment = moments.Moment(output, self._said, operation, draw.randrange(ranks)) if operation else None
        self.door = Door(world.training(course.name, output, *overrides), output.parent / f"{number}.log", moment)
        self._newest = found

    def until_its_moment(self) -> str | None:
        """Stop all of its processes there; where it was, or None where it has ended."""
        began = time.monotonic()
        while self.door.status() is None:
            rows = moments.said(self._said)
            if rows:
                pid, event, path = rows[0]
                stop_all(pid)
                return moments.place(event, path, self._is_pruned(path))
            if self.seconds is not None and time.monotonic() > began + self.seconds:
                stop_all()
                return self._where() if self.door.status() is None else None
            if time.monotonic() > began + LIMIT_S:
                raise ChaosError(f"nothing happened within {LIMIT_S:g} s: {self.door.text()[-2000:]}")
            time.sleep(0.0005)
        return None

    def killed(self) -> str:
        """Kill all of its processes there; where it was."""
        where = self.until_its_moment()
        for pid in tree() if where is not None else []:
            send(pid, signal.SIGKILL)
        end_of(self.door)
        return where or AFTER

    def launcher_and_ranks(self) -> tuple[int, list[int]]:
        """Process ids."""
        return self.door.pid, [pid for pid in tree() if pid != self.door.pid]

    def _is_pruned(self, path: str) -> bool:
        name = Path(path).parts[1] if path.startswith("checkpoints/") and len(Path(path).parts) > 1 else ""
        step = name.rpartition("step-")[2]
        return step.isdigit() and int(step) < max(steps_of(self.output), default=0)

    def _where(self) -> str:
        folder = self.output / "checkpoints"
        temporary = [path.name for path in folder.glob(".tmp-*")] if folder.is_dir() else []
        if temporary:
            return "while it prunes" if self._is_pruned(f"checkpoints/{temporary[0]}") else "while it saves"
        if list((self.output / "exports").glob(".tmp-*")):
            return "while it exports"
        told = self.door.text()
        began = "going on from" in told if self._newest else bool(rows_of(self.output))
        return "while it steps" if began else "before its first steps"


def not_behind(course: Course, output: Path, before: int) -> int:
    """The newest checkpoint's step. Raises ChaosError where it is older than `before`."""
    if children():
        raise ChaosError("processes were left behind")
    newest = check_safe(course, output)
    if newest < before:
        raise ChaosError(f"the newest checkpoint is of step {newest}, and was of step {before}")
    return newest


def comes_through(
    world: World, course: Course, output: Path, seen: Seen, *overrides: str, kept: list[int] | None = None
) -> None:
    """The same command ends well, and with it the round. Raises ChaosError where it does not, or anything differs."""
    door = Door(world.training(course.name, output, *overrides), output.parent / "last.log")
    end_well(door)
    check_whole(course, output, door, kept=kept)
    seen.ended["resumed, equal to the bit"] += 1


def kept_of(saved: int) -> list[int]:
    """The checkpoints that stay of a run that saved one more, as a signal had it do."""
    way = sorted({*range(2, STEPS + 1, 2), saved} - {0})
    return kept_steps(way, TRAINED["keep_checkpoints"], TRAINED["keep_every"])


def _when(course: Course, draw: random.Random, found: int) -> tuple[int | None, float | None]:
    """A file operation, each place that training is at as likely as the others; or seconds."""
    if draw.random() < 0.25:
        return None, draw.uniform(0, course.seconds)
    places: dict[str, list[int]] = {}
    for number, (event, path) in enumerate(course.operations, 1):
        places.setdefault(moments.place(event, path, pruned=False), []).append(number)
    names = sorted(places)
    weights = [1 if name == "while it takes its lock" else 4 for name in names]
    number = draw.choice(places[draw.choices(names, weights)[0]])
    return max(1, number * (STEPS - found) // STEPS) if found else number, None
