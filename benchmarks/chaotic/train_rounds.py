"""Trainings that are killed, signalled, and doubled, and the same command again until they are done."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from chaotic.checks import check_said, check_whole, end_of, rows_of, steps_of
from chaotic.processes import LIMIT_S, ChaosError, Door, go_on, none_left, send, tree
from chaotic.seen import AFTER, Seen
from chaotic.training import Attempt, comes_through, kept_of, not_behind
from chaotic.world import World


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
        status = end_of(attempt.door)
        seen.landed[where or AFTER] += 1
        by_hand = launcher in victims if where is not None else False
        check_said(attempt.door, refused=status != 0 and not by_hand)
        newest = not_behind(course, output, newest)
        if where is None and status == 0:
            break
    comes_through(world, course, output, seen)
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
    status = end_of(attempt.door)
    seen.landed[where or AFTER] += 1
    seen.ended[_ended_by(signum, status, attempt)] += 1
    comes_through(world, course, output, seen, kept=kept_of(not_behind(course, output, 0)))
    return seen


def _ended_by(signum: signal.Signals, status: int, attempt: Attempt) -> str:
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
