"""The errors that a user can cause, and how every command and launched process ends on them."""

from __future__ import annotations

import codecs
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
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from bigdit import machine

EXIT_USER, EXIT_BUG, EXIT_INTERRUPTED = 1, 3, 130

# What a system says of a path or its disk, which no command can mend: those that know more of it have said so before.
_OF_PATHS = (
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ENOSPC, errno.EDQUOT),
)

# What Python, glibc, libgomp and a worker's last words say where the system refuses a process, a thread or memory.
_NO_PROCESS = ("can't start new thread", os.strerror(errno.EAGAIN), "Thread creation failed")
_NO_MEMORY = ("MemoryError", os.strerror(errno.ENOMEM), "failed to map segment")
_NO_HOME = "Could not determine home directory"

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


def refused(error: BaseException) -> str | None:
    """What the system refused this process, where that is the cause of `error`, in a line; None where it is not."""
    for each in _causes(error):
        text = f"{type(each).__name__}: {each}"
        if _NO_HOME in text:
            return f"HOME is not set, and user {os.getuid()} has no home folder; set HOME to a folder it can write"
        process = any(sign in text for sign in _NO_PROCESS)
        if process or any(sign in text for sign in _NO_MEMORY):
            what = "starts no more processes or threads" if process else "gives no more memory"
            limits = machine.limits()
            where = f"it is limited to {limits}; raise that" if limits else "end other programs"
            return f"the system {what} for this process: {where}, or ask for fewer processes or workers"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it followed from, the last first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def guard(main: Callable[[], int | None]) -> int:
    """Run `main` and return the exit status: a user's error, a process that was killed, and what the system refuses are
    a line each and 1, a bug a traceback with versions and 3, Ctrl-C 130. In a launched group only rank 0 prints a
    user's error, or Ctrl-C, which all ranks hit. A report that cannot be written is an error too; notices are not."""
    prepare_streams()
    status = _guarded(main)
    lost_stream("stderr")
    if lost := lost_stream("stdout"):
        _tell(f"error: output: {lost}")
        return status or EXIT_USER
    return status


def _tell(text: str) -> None:
    """Say it where anybody may hear it."""
    with suppress(OSError):
        print(shown(text), file=sys.stderr)


def _guarded(main: Callable[[], int | None]) -> int:
    try:
        return main() or 0
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            for problem in error.problems:
                _tell(f"error: {problem}")
        return EXIT_USER
    except Killed as error:
        said = str(error).splitlines()[0].rstrip(":")
        _tell(f"error: {said}: somebody killed it, or a kernel short of memory; run it again")
        return EXIT_USER
    except BrokenPipeError:  # who reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the last flush would fail again
        return EXIT_USER
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends the exit too, without a traceback of it
        if os.environ.get("RANK", "0") == "0":
            _tell("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        return _unforeseen(error)


def _unforeseen(error: Exception) -> int:
    if why := refused(error):
        _tell(f"error: {why}")
        return EXIT_USER
    if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_PATHS:
        _tell(f"error: {str(error.filename)[:200]}: {error.strerror}")
        return EXIT_USER
    if isinstance(error, OSError) and error.filename is None:
        lost = lost_stream("stdout", "\n") or lost_stream("stderr", "\n")
        if lost:
            _tell(f"error: output: {lost}")
            return EXIT_USER
    _tell(traceback.format_exc().rstrip("\n"))
    found = " ".join(f"{name}={version}" for name, version in versions().items())
    _tell(f"this is a bug in bigdit, or in what it drives; versions: {found}")
    return EXIT_BUG


_PLAIN = {"×": "x", "·": ".", "–": "-", "—": "-", "−": "-", "→": "->", "≤": "<=", "≥": ">=", "≈": "~", "µ": "u"}


def prepare_streams() -> None:
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


def lost_stream(name: str, written: str = "") -> str | None:
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
