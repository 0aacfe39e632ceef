"""The errors that a user can cause, and how every command and launched process ends on them."""

from __future__ import annotations

import difflib
import errno
import functools
import importlib.metadata
import os
import platform
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable

EXIT_USER, EXIT_BUG, EXIT_INTERRUPTED = 1, 3, 130

# What a system says of a path or its disk, which no command can mend: those that know more of it have said so before.
_OF_PATHS = (
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ENOSPC, errno.EDQUOT),
)

_HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(Exception):
    """Something that the user can mend: each problem is one line that says what was asked, what was
    found and the nearest fix. All problems that are known are given at once."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Killed(Exception):
    """A process of ours was killed: by somebody, or by a kernel that was short of memory. Its first line says which."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> str:
    """`did you mean a, b?` for a misspelt name, or the list of what is known where nothing is near."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=most, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"known: {', '.join(sorted(known)[:12])}{', …' if len(known) > 12 else ''}"


def versions() -> dict[str, str]:
    """Installed versions of what decides a plan or a run, read without importing any of it."""
    found = {"python": platform.python_version()}
    for name in (
        "bigdit",
        "torch",
        "deepspeed",
        "diffusers",
        "transformers",
        "bitsandbytes",
        "torchao",
        "peft",
        "accelerate",
    ):
        found[name] = _version(name)
    return found


@functools.cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def shown(text: str) -> str:
    """`text` as it may reach a terminal: control characters (ESC), what turns the direction of writing, and bytes of
    file names that are no UTF-8 as `\\x1b`. Ends of lines stay."""
    return _HIDDEN.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    sign = ord(found[0])
    if 0xDC80 <= sign <= 0xDCFF:  # as os.fsdecode has a byte that is no UTF-8
        sign -= 0xDC00
    return f"\\x{sign:02x}" if sign < 256 else f"\\u{sign:04x}"


def guard(main: Callable[[], int | None]) -> int:
    """Run `main` and return the exit status: a user's error, and a process that was killed, is a line each and 1, a bug
    a traceback with versions and 3, Ctrl-C 130. In a launched group only rank 0 prints a user's error, or Ctrl-C, which
    all ranks hit."""
    try:
        return main() or 0
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            for problem in error.problems:
                print(f"error: {shown(problem)}", file=sys.stderr)
        return EXIT_USER
    except Killed as error:
        said = shown(str(error).splitlines()[0].rstrip(":"))
        print(f"error: {said}: somebody killed it, or a kernel short of memory; run it again", file=sys.stderr)
        return EXIT_USER
    except BrokenPipeError:  # who reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the last flush would fail again
        return EXIT_USER
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends the exit too, without a traceback of it
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_PATHS:
            print(f"error: {shown(str(error.filename)[:200])}: {error.strerror}", file=sys.stderr)
            return EXIT_USER
        print(shown(traceback.format_exc()), end="", file=sys.stderr)
        found = " ".join(f"{name}={version}" for name, version in versions().items())
        print(f"this is a bug in bigdit, or in what it drives; versions: {found}", file=sys.stderr)
        return EXIT_BUG
