"""Ways to damage one file."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path


def _flip(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    content = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def _cut(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    os.truncate(file, draw.randrange(file.stat().st_size))


def _longer(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    with open(file, "ab") as opened:
        opened.write(draw.randbytes(draw.randrange(1, 100)))


def _empty(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    os.truncate(file, 0)


def _zeros(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    """What a file system leaves of a page that was not on disk when the power went."""
    content = bytearray(file.read_bytes())
    start = draw.randrange(len(content)) // 512 * 512
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    file.write_bytes(content)


def _deleted(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    file.unlink()


def _sibling(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    shutil.copy(draw.choice(siblings), file)


def _folder(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    file.unlink()
    file.mkdir()


def _loop(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    file.unlink()
    file.symlink_to(file)


def _unreadable(file: Path, draw: random.Random, siblings: Sequence[Path]) -> None:
    file.chmod(0)


Damage = Callable[[Path, random.Random, Sequence[Path]], None]
DAMAGES: dict[str, tuple[Damage, int]] = {
    "one bit flipped": (_flip, 8),
    "cut": (_cut, 3),
    "made longer": (_longer, 2),
    "empty": (_empty, 2),
    "512 bytes of it zero": (_zeros, 2),
    "gone": (_deleted, 2),
    "another of its kind in its place": (_sibling, 3),
    "a folder in its place": (_folder, 1),
    "a link to itself in its place": (_loop, 1),
    "not to be read": (_unreadable, 1),
}
"""By name, with how often of all."""


def damaged(file: Path, draw: random.Random, siblings: Sequence[Path]) -> str:
    """Damage a file that is not empty; what was done to it. `siblings`: others that might be taken for it."""
    others = [each for each in siblings if each != file and each.is_file()]
    possible = {
        name: weight
        for name, (damage, weight) in DAMAGES.items()
        if (others or damage is not _sibling) and (os.geteuid() or damage is not _unreadable)  # root reads all
    }
    name = draw.choices(list(possible), list(possible.values()))[0]
    DAMAGES[name][0](file, draw, others)
    return name
