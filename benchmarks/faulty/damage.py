"""Flipped bits, cut files and full disks."""

from __future__ import annotations

import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from bigdit.errors import UserError
from bigdit.store.reader import Part
from faulty.case import Case, attempt, check_never_half, check_whole


@dataclass
class Found:
    """Of damages: how many there were, were found by reading everything, by reading what training reads; and how
    many training never reads, so that it goes on with the right values."""

    made: int = 0
    verified: int = 0
    read: int = 0
    unread: int = 0


def flip_rounds(case: Case, seed: int, count: int) -> Found:
    """Flip one random bit of a random part, `count` times."""
    generator, found = random.Random(seed), Found()
    folder = case.folder / f"flips-{seed}"
    folder.mkdir()
    for _ in range(count):
        name = generator.choice(sorted(case.parts))
        data = bytearray(case.parts[name])
        bit = generator.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(data)
        found.made += 1
        found.verified += bool(_damages(folder / name))
        values = _values(folder / name)
        if values is None:
            found.read += 1
        else:
            assert values == _values(case.job.data.features / name), f"bit {bit} of {name} changed what is read"
            found.unread += 1
    shutil.rmtree(folder)
    return found


def cut_rounds(case: Case, seed: int, count: int) -> Found:
    """Cut a random part at a random byte, or add bytes to it, `count` times."""
    generator, found = random.Random(seed), Found()
    folder = case.folder / f"cuts-{seed}"
    folder.mkdir()
    for _ in range(count):
        name = generator.choice(sorted(case.parts))
        data = case.parts[name]
        cut = generator.randrange(len(data))
        (folder / name).write_bytes(data[:cut] if generator.random() < 0.9 else data + bytes(1 + cut))
        found.made += 1
        found.verified += bool(_damages(folder / name))
        found.read += _values(folder / name) is None
    shutil.rmtree(folder)
    return found


def _damages(path: Path) -> list[str]:
    try:
        return list(Part.open(path).damages())
    except UserError as error:
        return [str(error)]


def _values(path: Path) -> list[bytes] | None:
    """All that training reads of a part; None where an error was raised."""
    try:
        part = Part.open(path)
        values = []
        for shape, rows in part.rows.items():
            for row in range(len(rows)):
                memory = bytearray(part.latents_span(shape, row)[1])
                index = part.read_latents(shape, row, memoryview(memory))
                text = part.text(part.choose_caption(shape, row, 0.5)).states
                values += [index.to_bytes(8), bytes(memory), text.contiguous().view(torch.uint8).numpy().tobytes()]
        return values
    except UserError:
        return None


def full_disk_round(case: Case, seed: int) -> str:
    """Extract onto a tmpfs that is too small, then give it room; how the extraction ended on the full disk."""
    root = case.folder / f"full-{seed}"
    size = sum(map(len, case.parts.values()))
    room = 64 * 1024 + random.Random(seed).randrange(size // 4, size // 2)
    root.mkdir()
    mount(root, f"size={room}")
    try:
        job = case.fresh(f"full-{seed}/store")
        ended = ""
        try:
            attempt(job)
        except UserError as error:
            ended = str(error)
        check_never_half(case, job)
        mount(root, f"remount,size={64 * size}")
        attempt(job)
        check_whole(case, job)
    finally:
        subprocess.run(["umount", str(root)], check=True)
    return ended


def can_mount(folder: Path) -> bool:
    """Whether this process may mount file systems."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        mount(folder, "size=65536")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False
    subprocess.run(["umount", str(folder)], check=True)
    return True


def mount(folder: Path, options: str) -> None:
    """A tmpfs, or a change of one. Raises CalledProcessError where this process may not."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
