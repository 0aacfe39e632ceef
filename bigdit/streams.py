"""The standard streams of a process, which may be closed, full, or unable to write every character."""

from __future__ import annotations

import codecs
import os
import sys
import unicodedata

_PLAIN = {"×": "x", "·": ".", "–": "-", "—": "-", "−": "-", "→": "->", "≤": "<=", "≥": ">=", "≈": "~", "µ": "u"}


def prepare() -> None:
    """Open closed streams on /dev/null, or files would get their numbers; replace what streams cannot write."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, at in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(at, "w" if at else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    codecs.register_error("bigdit.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if not (getattr(stream, "encoding", None) or "utf").lower().startswith("utf") and hasattr(
            stream, "reconfigure"
        ):
            stream.reconfigure(errors="bigdit.plain")


def lost(name: str, written: str = "") -> str | None:
    """Why stdout or stderr takes no more, told by what it holds back and by `written`; None where it does."""
    try:
        print(written, end="", file=getattr(sys, name), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), ("stdin", "stdout", "stderr").index(name))  # or the last flush fails
        return error.strerror
    return None


def _plain(error: UnicodeError) -> tuple[str, int]:
    """ASCII for what an encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    found = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each) or _letters(each) or "?" for each in found), error.end


def _letters(character: str) -> str:
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
