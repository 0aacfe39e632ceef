"""Trainings that go on elsewhere: on other processes, with other settings, under another clock, from a shell."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors import safe_open

from bigdit.checkpoint.shard_file import OFFSETS
from chaotic.checks import STEPS, check_clean, checkpoints, end_well, rows_of, steps_of
from chaotic.processes import LIMIT_S, ChaosError, Door, none_left, send
from chaotic.seen import AFTER, Seen
from chaotic.training import Attempt, comes_through, kept_of, not_behind
from chaotic.world import World, copied


def elsewhere_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """Killed on so many processes, resumed on another number of them."""
    names = ["fsdp2", "fp32"] if draw.random() < 0.5 else ["fp32", "fsdp2"]
    first, second = (world.course(name) for name in names)
    output = copied(first.half, folder / "run") if draw.random() < 0.5 else folder / "run"
    seen = Seen("resumed on another number of processes: two by FSDP2, or one")
    seen.landed[Attempt(world, first, output, draw).killed()] += 1
    door = Door(world.training(second.name, output), folder / "last.log")
    end_well(door)
    rows = rows_of(output)
    if [row[0] for row in rows] != list(range(1, STEPS + 1)) or steps_of(output)[-1] != STEPS:
        raise ChaosError(f"rows {rows}: {door.text()[-2000:]}")
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
    overrides: tuple[str, ...] = ()
    seen = Seen("all files' times set to 1980 or 2100, killed, `latest` lost by turns")
    if draw.random() < 0.5:
        overrides = ("train.keep_checkpoints=1", "train.keep_every=null")
        seen = Seen("resumed with fewer checkpoints to keep")
    newest = 6
    for _ in range(draw.choice([0, 1, 2])):
        if not overrides:
            _set_times(output, draw)
        seen.landed[Attempt(world, course, output, draw, *overrides).killed()] += 1
        newest = not_behind(course, output, newest)
        if not overrides and draw.random() < 0.5:
            (output / "checkpoints/latest").unlink(missing_ok=True)
    if not overrides:
        _set_times(output, draw)
    comes_through(world, course, output, seen, *overrides, kept=[STEPS] if overrides else None)
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
    comes_through(world, course, output, seen, kept=kept_of(not_behind(course, output, 0)))
    return seen
