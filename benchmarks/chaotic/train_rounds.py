"""Trainings that are killed, signalled, doubled and moved elsewhere, and the same command again until it is done."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open

from bigdit.checkpoint.prune import kept_steps
from bigdit.checkpoint.shard_file import OFFSETS
from chaotic import moments
from chaotic.processes import LIMIT_S, ChaosError, Door, children, go_on, none_left, send, stop_all, tree
from chaotic.world import (
    STEPS,
    TRAINED,
    Course,
    World,
    check_clean,
    check_safe,
    check_said,
    check_whole,
    checkpoints,
    copied,
    rows_of,
    steps_of,
)

AFTER = "when it had ended"


@dataclass
class Seen:
    """What a round saw: the fault, where each of its disturbances landed, and how attempts and round ended."""

    fault: str
    landed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)


class Attempt:
    """A training that runs until its moment: before a file operation of one of its processes, or after a time."""

    def __init__(self, world: World, course: Course, output: Path, draw: random.Random, *overrides: str) -> None:
        self.output, self.number = output, len(list(output.parent.glob("*.log")))
        said = output.parent / f"{self.number}.said"
        found = max(steps_of(output), default=0)
        operation, self.seconds = _when(course, draw, found)
        ranks = 2 if course.name in ("fsdp2", "zero2") else 1
        moment = moments.Moment(output, said, operation, draw.randrange(ranks)) if operation else None
        self.door = Door(world.training(course.name, output, *overrides), output.parent / f"{self.number}.log", moment)
        self._said, self._newest = said, found

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


def killed_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """`kill -9`, again and again."""
    course = world.course(draw.choices(["single", "fsdp2", "zero2"], [80, 18, 2])[0])
    whom = draw.choices(["a process", "all processes", "the launcher"], [3, 3, 2])[0]
    many = "one process" if course.name == "single" else course.name
    seen, output, kills = Seen(f"training ({many}): `kill -9` of {whom}"), folder / "run", draw.choice([1, 1, 2, 3])
    newest = 0
    for _ in range(kills):
        attempt = Attempt(world, course, output, draw)
        where = attempt.until_its_moment()
        if where is not None:
            launcher, ranks = attempt.launcher_and_ranks()
            victims = {
                "a process": [draw.choice(ranks or [launcher])],
                "all processes": [launcher, *ranks],
                "the launcher": [launcher],
            }[whom]
            for pid in victims:
                send(pid, signal.SIGKILL)
            go_on()
        status = attempt.door.ends()
        none_left(30)
        seen.landed[where or AFTER] += 1
        by_hand = launcher in victims if where is not None else False
        check_said(attempt.door, refused=status != 0 and not by_hand)
        newest = _not_behind(course, output, newest)
        if where is None and status == 0:
            break
    _comes_through(world, course, output, seen)
    return seen


def signalled_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """A signal that ends in order, or Ctrl-C twice."""
    course = world.course(draw.choices(["single", "fsdp2", "zero2"], [85, 14, 1])[0])
    signum = draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
    twice = signum == signal.SIGINT and draw.random() < 0.5
    whom = draw.choice(["its launcher", "one process", "all"])
    output = folder / "run"
    seen = Seen(f"training: {'Ctrl-C twice' if twice else signum.name} to {whom}")
    attempt = Attempt(world, course, output, draw)
    where = attempt.until_its_moment()
    if where is not None:
        launcher, ranks = attempt.launcher_and_ranks()
        chosen = {
            "its launcher": [launcher],
            "one process": [draw.choice(ranks or [launcher])],
            "all": [launcher, *ranks],
        }
        for pid in chosen[whom]:
            send(pid, signum)
        go_on()
        if twice:
            time.sleep(draw.uniform(0, 0.7))
            for pid in {launcher, *ranks} & set(tree()):
                send(pid, signum)
    status = attempt.door.ends()
    none_left(30)
    seen.landed[where or AFTER] += 1
    seen.ended[_ended_by(signum, status, attempt, course)] += 1
    saved = _not_behind(course, output, 0)
    kept = kept_steps(
        sorted({*range(2, STEPS + 1, 2), saved} - {0}), TRAINED["keep_checkpoints"], TRAINED["keep_every"]
    )
    _comes_through(world, course, output, seen, kept=kept)
    return seen


def _ended_by(signum: signal.Signals, status: int, attempt: Attempt, course: Course) -> str:
    """How a signalled training ended, in words. Raises ChaosError where that is none of the ways that are stated."""
    text = attempt.door.text()
    if status == 0:
        check_said(attempt.door, refused=False)
        return "it was done before the signal counted"
    if status == -signum:
        check_said(attempt.door, refused=False)
        if steps_of(attempt.output):
            raise ChaosError(f"the launcher was ended by {signum.name} in the middle of training")
        return "ended before it heard signals"
    if status != 128 + signum:
        raise ChaosError(f"status {status} after {signum.name}:\n{text[-2000:]}")
    if f"{signum.name}: saved " in text:
        check_said(attempt.door, refused=False)
        step = int(text.rpartition("goes on from step ")[2].split()[0])
        if (attempt.output / "checkpoints/latest").read_text() != f"step-{step:08d}\n":
            raise ChaosError(f"step {step} was said to be saved, and `latest` names another")
        return f"saved, status {status}"
    for said, what in (
        ("ended before a step was taken", "nothing to save yet, said"),
        ("ended at once, without a checkpoint", "ended at once, said"),
    ):
        if f"{signum.name}: {said}" in text:
            check_said(attempt.door, refused=False)
            return f"{what}, status {status}"
    if text.endswith("interrupted\n") and signum == signal.SIGINT:
        return f"nothing to save yet, said, status {status}"
    check_said(attempt.door, refused=True)
    if f"was ended by {signum.name}" not in text or "going on from" in text or rows_of(attempt.output):
        raise ChaosError(f"after {signum.name}: {text[-2000:]}")
    return f"nothing to save yet, said, status {status}"


def twice_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """Two trainers of one output."""
    course = world.course(draw.choices(["single", "fsdp2"], [8, 2])[0])
    output, seen = folder / "run", Seen("two trainings of one output at once")
    waits = draw.random() < 0.5  # longer than the second one waits for the lock
    attempt = Attempt(world, course, output, draw)
    second = None
    if waits:
        seen.landed[attempt.until_its_moment() or AFTER] += 1
    else:
        time.sleep(draw.uniform(0, 0.3))
    second = Door(world.training(course.name, output), folder / "second.log")
    if waits:
        status = second.ends()
        go_on()
        first = attempt.door.ends()
    else:
        _lets_go(attempt, second)
        first, status = attempt.door.ends(), second.ends()
    none_left(30)
    for door, ended in ((attempt.door, first), (second, status)):
        check_said(door, refused=ended != 0)
        if ended not in (0, 1) or (ended == 1 and "is in use by process" not in door.text()):
            raise ChaosError(f"one of two ended with {ended}: {door.text()[-2000:]}")
    refused = [first, status].count(1)
    if refused == 2:
        raise ChaosError("both were refused")
    seen.ended["one was refused" if refused else "one waited until the other had ended"] += 1
    check_whole(course, output, attempt.door if first == 0 else second)
    return seen


def _lets_go(attempt: Attempt, second: Door) -> None:
    """Let a training go on that stops at its moment."""
    until = time.monotonic() + LIMIT_S
    while (attempt.door.status() is None or second.status() is None) and time.monotonic() < until:
        go_on()
        time.sleep(0.05)


def elsewhere_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """Killed on so many processes, resumed on another number of them."""
    names = ["fsdp2", "fp32"] if draw.random() < 0.5 else ["fp32", "fsdp2"]
    first, second = (world.course(name) for name in names)
    output = copied(first.half, folder / "run") if draw.random() < 0.5 else folder / "run"
    seen = Seen("resumed on another number of processes: two by FSDP2, or one")
    attempt = Attempt(world, first, output, draw)
    where = attempt.until_its_moment()
    for pid in tree() if where is not None else []:
        send(pid, signal.SIGKILL)
    attempt.door.ends()
    none_left(30)
    seen.landed[where or AFTER] += 1
    door = Door(world.training(second.name, output), folder / "last.log")
    status = door.ends()
    none_left(30)
    check_said(door, refused=False)
    rows = rows_of(output)
    if status != 0 or [row[0] for row in rows] != list(range(STEPS)) or steps_of(output)[-1] != STEPS:
        raise ChaosError(f"status {status}, rows {rows}: {door.text()[-2000:]}")
    far = max(abs(row[1] - right[1]) / right[1] for row, right in zip(rows, second.rows, strict=True))
    masters, right_masters = _masters(output), _masters(second.whole)
    off = max(float(np.abs(masters[name] - right).max()) for name, right in right_masters.items())
    if masters.keys() != right_masters.keys() or far > 1e-4 or off > 1e-4:
        raise ChaosError(f"losses are off by {far:.2g}, weights by {off:.2g}")
    check_clean(output)
    seen.ended["losses and weights within 1e-4"] += 1
    return seen


def _masters(output: Path) -> dict[str, np.ndarray]:
    """The fp32 weights of the last checkpoint, flat, by name."""
    pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
    for file in checkpoints(output)[-1].files():
        with safe_open(file, "np") as opened:
            offsets = json.loads(opened.metadata()[OFFSETS])
            for name in [each for each in opened.keys() if each.startswith("master.")]:  # noqa: SIM118  # no mapping
                pieces.setdefault(name, []).append((offsets[name]["saved_offsets"][0], opened.get_tensor(name)))
    ordered = {name: sorted(each, key=lambda piece: piece[0]) for name, each in pieces.items()}
    return {name: np.concatenate([values for _, values in each]) for name, each in ordered.items()}


def moved_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """A resume with fewer checkpoints to keep, or under a clock that is wrong."""
    course = world.course("single")
    output = copied(course.half, folder / "run")
    if draw.random() < 0.5:
        seen, overrides = (
            Seen("resumed with fewer checkpoints to keep"),
            ("train.keep_checkpoints=1", "train.keep_every=null"),
        )
    else:
        seen, overrides = Seen("all files' times set to 1980 or 2100, killed, `latest` lost by turns"), ()
    newest = 6
    for _ in range(draw.choice([0, 1, 2])):
        if not overrides:
            _set_times(output, draw)
        attempt = Attempt(world, course, output, draw, *overrides)
        where = attempt.until_its_moment()
        for pid in tree() if where is not None else []:
            send(pid, signal.SIGKILL)
        attempt.door.ends()
        none_left(30)
        seen.landed[where or AFTER] += 1
        newest = _not_behind(course, output, newest)
        if not overrides and draw.random() < 0.5:
            (output / "checkpoints/latest").unlink(missing_ok=True)
    if not overrides:
        _set_times(output, draw)
    _comes_through(world, course, output, seen, *overrides, kept=[STEPS] if overrides else None)
    return seen


def _set_times(output: Path, draw: random.Random) -> None:
    moment = draw.choice([315532800, 4102444800])
    for file in output.rglob("*"):
        os.utime(file, (moment, moment))


def console_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """The console script itself, with its own launcher and imports."""
    course = world.course(draw.choice(["single", "fsdp2"]))
    output, signum = folder / "run", draw.choice([signal.SIGKILL, signal.SIGTERM])
    seen = Seen(f"`bigdit train` from a shell: {signum.name}")
    line = [str(Path(sys.executable).with_name("bigdit")), *map(str, world.training(course.name, output))]
    with open(folder / "0.log", "w") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + LIMIT_S
    seconds = draw.uniform(0.5, 20) if draw.random() < 0.3 else None
    step = draw.randrange(2, STEPS, 2)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() < until:
        if seconds is not None and time.monotonic() > began + seconds:
            break
        if seconds is None and step in steps_of(output):
            time.sleep(draw.uniform(0, 0.1))
            break
        time.sleep(0.001)
    landed = AFTER if process.poll() is not None else "while it trains" if rows_of(output) else "before its first steps"
    seen.landed[landed] += 1
    send(process.pid, signum)
    status = process.wait(LIMIT_S)
    none_left(30)
    seen.ended[f"status {status}"] += 1
    text = (folder / "0.log").read_text()
    if landed != "before its first steps" and ("Traceback" in text or status not in (0, -9, 143)):
        raise ChaosError(f"status {status}: {text[-2000:]}")
    _comes_through(world, course, output, seen, kept=_kept(_not_behind(course, output, 0)))
    return seen


def _kept(saved: int) -> list[int]:
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


def _not_behind(course: Course, output: Path, before: int) -> int:
    """The newest checkpoint's step. Raises ChaosError where it is older than `before`."""
    if children():
        raise ChaosError("processes were left behind")
    newest = check_safe(course, output)
    if newest < before:
        raise ChaosError(f"the newest checkpoint is of step {newest}, and was of step {before}")
    return newest


def _comes_through(
    world: World, course: Course, output: Path, seen: Seen, *overrides: str, kept: list[int] | None = None
) -> None:
    door = Door(world.training(course.name, output, *overrides), output.parent / "last.log")
    status = door.ends()
    none_left(30)
    check_said(door, refused=False)
    if status != 0:
        raise ChaosError(f"the same command ended with {status}: {door.text()[-2000:]}")
    check_whole(course, output, door, kept=kept)
    seen.ended["resumed, equal to the bit"] += 1
