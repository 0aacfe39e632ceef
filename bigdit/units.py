"""Bytes, counts, durations and image sizes as text. Inside bigdit all sizes are integers of bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from bigdit.errors import UserError

T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest int64, for sizes and seeds of torch and numpy."""
LARGEST_SIDE = 65535
"""The most pixels of a side: the limit of JPEG (ITU-T T.81, B.2.2)."""

KIB, MIB, GIB = 2**10, 2**20, 2**30

_SUFFIXES = {"B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024 * GIB}
_SUFFIXES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

A_SIZE = "a memory size with a unit was expected, such as 46068MiB or 24GB"

LEAST_MEMORY, MOST_MEMORY = GIB, 1024 * 1024 * GIB
"""Bounds for the memory of a machine or a GPU; other values must have a wrong unit."""

_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_MOST_DIGITS = 20  # of a number of bytes below 2^64


def gib(n: float) -> str:
    """Bytes in GiB; small ones in MiB or KiB."""
    unit, name = unit_of(n)
    return f"{int(n)} B" if unit == 1 else f"{n / unit:.2f} {name}"


def unit_of(n: float) -> tuple[int, str]:
    """The unit that `gib` uses for `n` bytes: its size in bytes, and its name."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(n) >= unit * 0.1 and (unit != KIB or abs(n) >= KIB):
            return unit, name
    return 1, "B"


def on_disk(nbytes: float) -> str:
    """Bytes in decimal units, as for disks: `2.46 MB`, `41.5 TB`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:,.0f} {name}"
    return f"{nbytes:.0f} B"


def count(n: float) -> str:
    """A parameter count: 14.29 B, 1.604 B, 39.8 M."""
    for least, unit, name, digits in ((1e10, 1e9, "B", 2), (1e9, 1e9, "B", 3), (1e6, 1e6, "M", 1), (1e3, 1e3, "k", 1)):
        if n >= least:
            return f"{n / unit:.{digits}f} {name}"
    return str(int(n))


def how_many(number: int, what: str) -> str:
    """A number with a noun: `1 process`, `2 processes`, `1,029 images`."""
    plural = "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{'' if number == 1 else plural}"


def how_many_of(numbers: range, what: str) -> str:
    """`an image`, `2 images`, `1 to 3 images`."""
    if numbers[0] == numbers[-1] == 1:
        return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"
    return f"{numbers[0]} to {numbers[-1]} {what}s" if len(numbers) > 1 else how_many(numbers[0], what)


def in_groups(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """The items in order, in groups of at most `most` in all, or of a single larger item."""
    group: list[T] = []
    filled = 0
    for item in items:
        own = size(item)
        if group and filled + own > most:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += own
    if group:
        yield group


def duration(seconds: float) -> str:
    """Seconds as `4.2 s`, `3 min 05 s` or `2 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def parse_bytes(text: str) -> int:
    """`46068MiB`, `24GB` or `1024B` in bytes. Raises UserError without a unit."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _SUFFIXES or len(match[1]) > _MOST_DIGITS:
        raise UserError(f"{A_SIZE}, and {text[:40]!r} was found")
    return int(float(match[1]) * _SUFFIXES[match[2].upper()])


def parse_memory(text: str) -> int:
    """The memory of a machine or a GPU in bytes. Raises UserError as `parse_bytes`, and for values out of bounds."""
    found = parse_bytes(text)
    if LEAST_MEMORY <= found <= MOST_MEMORY:
        return found
    number = re.sub(r"[A-Za-z\s]", "", text)
    meant = f"; did you mean {number}GiB?" if LEAST_MEMORY <= float(number) * GIB <= MOST_MEMORY else ""
    raise UserError(f"{text.strip()} is {gib(found)}, and machines and GPUs have 1 GiB to 1024 TiB{meant}")


def parse_resolution(text: str, option: str = "--resolution") -> int | tuple[int, int]:
    """`1024` or `480x832` (height × width), the value of `option`. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d{1,20})(?:[x×](\d{1,20}))?", text.strip())
    sides = [] if match is None else [int(side) for side in match.groups() if side is not None]
    if match is None or not all(0 < side <= LARGEST_SIDE for side in sides):
        most = f", {LARGEST_SIDE} a side at most" if any(side > LARGEST_SIDE for side in sides) else ""
        raise UserError(
            f"{option} expects pixels such as 1024 or 480x832 (height x width){most}, and {text[:40]!r} was found"
        )
    return (int(match[1]), int(match[2])) if match[2] else int(match[1])


def parse_sizes(
    option: str, asked: int | str | tuple[int, int] | Sequence[int | str | tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """All sizes in `asked`, the value of `option`, in order. Raises UserError with the option's name."""
    if isinstance(asked, list):
        return tuple(size for each in asked for size in parse_sizes(option, each))
    if isinstance(asked, tuple) and len(asked) == 2 and all(isinstance(side, int) for side in asked):
        asked = "x".join(map(str, asked))
    if not isinstance(asked, int | str):
        raise UserError(f"{option} expects pixels such as 1024, (480, 832) or a list of them, and {asked!r} was found")
    parsed = [parse_resolution(part, option) for part in str(asked).split(",")]
    return tuple((each, each) if isinstance(each, int) else each for each in parsed)


def size_text(size: tuple[int, int]) -> str:
    """A size in the form that `parse_sizes` reads: `1024`, `480x832`."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def parse_count(text: str, option: str) -> int:
    """`250000`, `30M` or `1.5k`, the value of `option`. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d[\d_]{0,17}(?:\.\d+)?)\s*([kmbg]?)", text.strip().lower())
    number = float(match[1].replace("_", "")) * _THOUSANDS[match[2]] if match else 0.5
    if not number.is_integer():
        raise UserError(f"{option} expects a number such as 250000, 1.5k or 30M, and {text[:40]!r} was found")
    return int(number)
