"""Users' errors, exit statuses, and streams that cannot be written."""

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
from contextlib import contextmanager, suppress
from threading import Timer

from bigdit import machine

EXIT_USER, EXIT_BUG, EXIT_INTERRUPTED = 1, 3, 130

# The system's errors about paths and disks that commands need not report themselves.
_PATH_ERRORS = (
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ENOSPC, errno.EDQUOT),
)

# Messages of Python, glibc, libgomp and workers when the system gives no more processes, threads or memory.
_NO_PROCESS = ("can't start new thread", os.strerror(errno.EAGAIN), "Thread creation failed")
_NO_MEMORY = ("MemoryError", os.strerror(errno.ENOMEM), "failed to map segment")
_NO_HOME = "Could not determine home directory"

_HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(Exception):
    """Problems that the user can fix, one line each: what was asked, what was found, the nearest fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Killed(Exception):
    """A child process was killed, by a person or by a kernel without memory. The first line names it."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> str:
    """`did you mean a, b?` for a misspelt name; the known names if none is similar."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=most, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"known: {', '.join(sorted(known)[:12])}{', …' if len(known) > 12 else ''}"


def versions() -> dict[str, str]:
    """Installed versions of the libraries that affect a plan or a run, without importing them."""
    names = ("bigdit", "torch", "deepspeed", "diffusers", "transformers", "bitsandbytes", "torchao")
    found = {"python": platform.python_version()} | {name: _version(name) for name in (*names, "peft", "accelerate")}
    extras = {name: _version(name) for name in ("prodigyopt", "schedulefree")}
    return found | {name: version for name, version in extras.items() if version != "missing"}


@functools.cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def shown(text: str) -> str:
    """`text` made safe for a terminal: control characters (as `\\x1b`), changes of the writing direction, and bytes
    that are no UTF-8 are escaped. Line ends stay."""
    return _HIDDEN.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    sign = ord(found[0])
    if 0xDC80 <= sign <= 0xDCFF:  # os.fsdecode's form of a byte that is no UTF-8
        sign -= 0xDC00
    return f"\\x{sign:02x}" if sign < 256 else f"\\u{sign:04x}"


def refused(error: BaseException) -> str | None:
    """A message if `error` comes from the system's limits on processes, threads or memory, or a missing HOME; else
    None."""
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
    """An error, its cause, the cause's cause, …."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def guard(main: Callable[[], int | None]) -> int:
    """Run `main`, print its error, and return the exit status.

    A user's error, a killed process and a limit of the system: one line, 1. A bug: a traceback with versions, 3.
    Ctrl-C: 130. Of launched processes only the first on each machine prints a user's error. A report that cannot be
    written is an error; a lost notice is not.
    """
    prepare_streams()
    if os.environ.get("TORCH_LOGS") == "":  # torch 2.13 cannot be imported with an empty value
        del os.environ["TORCH_LOGS"]
    with _interrupted_again():
        status = _guarded(main)
    lost_stream("stderr")
    if lost := lost_stream("stdout"):
        _print(f"error: output: {lost}")
        return status or EXIT_USER
    return status


@contextmanager
def _interrupted_again() -> Iterator[None]:
    """Where Python would print and drop a Ctrl-C, in finalizers and in calls from C, it interrupts again."""
    before = sys.unraisablehook

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()  # when this call has returned
        else:
            before(what)

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = before


def _print(text: str) -> None:
    """Print to stderr, if that is possible."""
    with suppress(OSError):
        print(shown(text), file=sys.stderr)


def _guarded(main: Callable[[], int | None]) -> int:
    try:
        return main() or 0
    except UserError as error:
        # Once on each machine, because problems may differ between machines.
        if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
            for problem in error.problems:
                _print(f"error: {problem}")
        return EXIT_USER
    except Killed as error:
        cause = str(error).splitlines()[0].rstrip(":")
        _print(f"error: {cause}: somebody killed it, or a kernel short of memory; run it again")
        return EXIT_USER
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the last flush fails again
        return EXIT_USER
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends the process without a traceback
        if os.environ.get("RANK", "0") == "0":
            _print("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    if why := refused(error):
        _print(f"error: {why}")
        return EXIT_USER
    if isinstance(error, OSError) and error.filename is not None and error.errno in _PATH_ERRORS:
        _print(f"error: {str(error.filename)[:200]}: {error.strerror}")
        return EXIT_USER
    if isinstance(error, OSError) and error.filename is None:
        lost = lost_stream("stdout", "\n") or lost_stream("stderr", "\n")
        if lost:
            _print(f"error: output: {lost}")
            return EXIT_USER
    _print(traceback.format_exc().rstrip("\n"))
    found = " ".join(f"{name}={version}" for name, version in versions().items())
    _print(f"this is a bug in bigdit, or in what it drives; versions: {found}")
    return EXIT_BUG


_PLAIN = {"×": "x", "·": ".", "–": "-", "—": "-", "−": "-", "→": "->", "≤": "<=", "≥": ">=", "≈": "~", "µ": "u"}


def prepare_streams() -> None:
    """Open closed streams on /dev/null, because files would get their numbers. Replace characters that a stream cannot
    write."""
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
    """Try to write `written` to stdout or stderr. Returns the reason if it cannot be written, else None."""
    try:
        print(written, end="", file=getattr(sys, name), flush=True)
    except OSError as error:
        stream = ("stdin", "stdout", "stderr").index(name)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # else the last flush fails
        return error.strerror
    return None


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the encoding lacks by ASCII."""
    assert isinstance(error, UnicodeEncodeError)
    found = error.object[error.start : error.end]
    plain = (_PLAIN.get(each) or unicodedata.normalize("NFKD", each) for each in found)
    return "".join(each.encode("ascii", "ignore").decode() or "?" for each in plain), error.end
