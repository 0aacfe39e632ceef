"""Notices for readers of the figures: each text once, with a count and the script's line. Lines of stacks."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from types import FrameType
from typing import Any

LineDict = dict[str, Any]
"""`file`, `line`, `name` of the function, `code` of the line, `own`: it is the script's, not a library's."""

_HERE = os.path.dirname(os.path.abspath(__file__))
_COMPUTING = tuple(os.path.join(_HERE, name) for name in ("values.py", "host.py"))
_STDLIB = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
_LONGEST = 120
_INNERMOST = 40


@cache
def owner(file: str) -> str:
    """`script`, `library`, or `none` for python itself, generated code and the emulation."""
    if file.startswith("<") or file.startswith(_HERE):
        return "none"
    if any(part in file for part in _INSTALLED):
        return "library"
    return "none" if os.path.realpath(file).startswith(_STDLIB) else "script"


@cache
def line(file: str, number: int, name: str) -> LineDict:
    code = linecache.getline(file, number).strip()[:_LONGEST]
    return {"file": file, "line": number, "name": name, "code": code, "own": owner(file) == "script"}


def places(frames: Iterable[tuple[str, int, str]]) -> tuple[LineDict | None, LineDict | None]:
    """The script's innermost line in frames (innermost first), and the innermost line of a library within it.

    Other libraries are preferred to torch, which they call.
    """
    library: LineDict | None = None
    torch: LineDict | None = None
    for file, number, name in frames:
        whose = owner(file)
        if file in _COMPUTING:  # within it the emulation calls torch, not the library
            library = torch = None
        if whose == "script":
            return line(file, number, name), library or torch
        if whose == "library" and _TORCH not in file:
            library = library or line(file, number, name)
        elif whose == "library":
            torch = torch or line(file, number, name)
    return None, library or torch


def of_snapshot(frames: Sequence[dict[str, Any]]) -> list[tuple[str, int, str]]:
    """A stack of the allocator's history, innermost first."""
    return [(frame["filename"], frame["line"], frame["name"]) for frame in frames]


def of_stack(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """The stack of a running thread, innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def shown(frames: Sequence[tuple[str, int, str]]) -> list[LineDict]:
    """A stack for a report: innermost first, with frames of scripts and libraries only."""
    return [line(*frame) for frame in frames if owner(frame[0]) != "none"][:_INNERMOST]


_MOST = 100
_found: dict[str, dict[str, Any]] = {}


def add(text: str) -> None:
    """Add a notice. The same text at the same line of the script is counted."""
    place, _ = places(of_stack(sys._getframe(1)))
    key = text if place is None else f"{text} {place['file']}:{place['line']}"
    known = _found.get(key)
    if known is not None:
        known["count"] += 1
    elif len(_found) < _MOST:
        _found[key] = {"text": text, "count": 1, "place": place}


def found() -> list[dict[str, Any]]:
    return list(_found.values())


def forget() -> None:
    _found.clear()
