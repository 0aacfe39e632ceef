"""Disks that are full in the middle, then given room."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

from faulty.damage import can_mount, mount

from chaotic.checks import check_safe, check_whole, end_well, end_when_full, steps_of
from chaotic.extract_rounds import check_parts, comes_through
from chaotic.processes import ChaosError, Door
from chaotic.seen import Seen
from chaotic.world import World, copied

_ROOM = "size=1g"


def train_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """A training, from its start or going on."""
    course, disk = world.course("single"), folder / "disk"
    seen = Seen("training on a disk that is full in the middle, then given room")
    if not can_mount(disk):
        seen.ended["not tried: this process may not mount file systems"] += 1
        return seen
    mount(disk, _ROOM)
    try:
        output = copied(course.half, disk / "run") if draw.random() < 0.5 else disk / "run"
        there = _used(output)
        before = max(steps_of(output), default=0)
        whole = _used(course.whole)
        mount(disk, f"remount,size={there + 4096 + draw.randrange(max(whole - there, whole // 3))}")
        door = Door(world.training(course.name, output), folder / "0.log")
        status = end_when_full(door)
        newest = check_safe(course, output)
        if newest < before:
            raise ChaosError(f"the newest checkpoint is of step {newest}, and was of step {before}")
        seen.landed[_asked(door) if status else "it had room enough"] += 1
        mount(disk, f"remount,{_ROOM}")
        again = Door(world.training(course.name, output), folder / "1.log")
        end_well(again, "with room it", within=15)
        check_whole(course, output, again)
        seen.ended["one line; with room equal to the bit"] += 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    return seen


def extract_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """An extraction."""
    disk, size = folder / "disk", sum(map(len, world.store.files.values()))
    seen = Seen("extraction to a disk that is full in the middle, then given room")
    if not can_mount(disk):
        seen.ended["not tried: this process may not mount file systems"] += 1
        return seen
    mount(disk, f"size={32 * 1024 + draw.randrange(size)}")
    try:
        root = disk / "features"
        status = end_when_full(Door(world.extracting(root), folder / "0.log"))
        check_parts(world, root, set())
        seen.landed["full" if status else "it had room enough"] += 1
        mount(disk, f"remount,{_ROOM}")
        comes_through(world, root, seen)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    return seen


def _used(folder: Path) -> int:
    """Bytes of a tmpfs: whole pages."""
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in folder.rglob("*") if file.is_file())


def _asked(door: Door) -> str:
    """What could not be written."""
    line = next(line for line in door.text().splitlines() if line.startswith("error: "))
    for what in ("checkpoint", "export", "metrics", "receipt", "lock", "latest"):
        if re.search(rf"(cannot|to) .*{what}", line):
            return f"full at the {what}"
    return "full"
