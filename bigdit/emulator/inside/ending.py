"""The account is written once, however the process ends: by itself, by an error, by a signal, after its steps; or by
exec, where it goes on as another program."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from . import parent

began = time.time()
name = ""
"""What this process's files are called by, once it uses a card."""

_written = False
_watching = False
_owner = os.getpid()
_ending = threading.Lock()
_writing = threading.RLock()
_exit = os._exit
_account: Callable[[str, float], None] | None = None
_forget: Sequence[Callable[[], None]] = ()


def install(account: Callable[[str, float], None], forget: Sequence[Callable[[], None]]) -> None:
    """To be called as the first thing, so that it is the last thing at exit.

    `account` writes how the process ended, after so many seconds; `forget` is called in a forked process.
    """
    global _account, _forget
    _account, _forget = account, forget
    atexit.register(lambda: write("exit"))
    os.register_at_fork(after_in_child=_in_child)
    os._exit = leave  # type: ignore[assignment]
    os.execv, os.execve = _becoming(os.execv), _becoming(os.execve)  # which all others of os call


def begin() -> None:
    """This process uses a card from now on; by exec it may be another program than one that did."""
    global name
    name = f"{os.getpid()}-{parent.count(f'begun-{os.getpid()}-*.json')}"
    parent.write_json(f"begun-{name}.json", {"argv": sys.argv, "rank": os.environ.get("RANK")})
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        _watch_for_termination()


def note_crowd(cards: int) -> None:
    """Say so where a launcher started more processes on this machine than there are cards."""
    counts = [os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")]
    processes = max((int(count) for count in counts if count.isdigit()), default=1)
    if processes > cards:
        parent.write_json(f"crowd-{os.getpid()}.json", {"processes": processes})


def refuse(reason: str) -> None:
    """End a process that cannot be emulated, with exit status 1. `bigdit emulate` says `reason`, a line, at its end."""
    parent.write_json(f"refused-{os.getpid()}.json", {"reason": reason})
    if not parent.OUT:  # nobody waits for it
        sys.stderr.write(f"bigdit emulate: {reason}\n")
        sys.stderr.flush()
    os._exit(1)


def end_after_steps() -> None:
    """All steps that were asked for are done: end well, at once."""
    write("steps")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed: nobody reads it
            stream.flush()
    _exit(0)


def leave(status: int) -> Any:
    """os._exit, after the account."""
    write("exit")
    _exit(status)


def _becoming(become: Callable[..., Any]) -> Callable[..., Any]:
    """exec, after the account; where it fails, this program has one to write yet."""

    def after_the_account(*args: Any) -> Any:
        global _written
        write("exec")
        try:
            return become(*args)
        finally:
            _written = False

    return after_the_account


def write(how: str) -> None:
    """Write the account of this process, once; who comes while another thread writes it waits for that."""
    global _written
    with _writing:
        if _written or os.getpid() != _owner:
            return
        _written = True
        if _account is not None:
            _account(how, time.time() - began)


def _watch_for_termination() -> None:
    """Write the account when SIGTERM comes, and then end by it: in python's handler, or in a thread if that is sooner.

    A launcher sends it to those who wait for a peer that failed. They wait in C++, where python's handler would only
    run when that is over: a pipe tells the thread at once.
    """
    global _watching
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:  # it is the script's
        signal.set_wakeup_fd(before)
        return
    _watching = True
    signal.signal(signal.SIGTERM, _on_signal)
    threading.Thread(target=_end_when_told, args=(reader,), daemon=True, name="bigdit-ending").start()


def _end_when_told(reader: int) -> None:
    while True:
        number = os.read(reader, 1)
        if number == bytes([signal.SIGTERM]) and signal.getsignal(signal.SIGTERM) is _on_signal:
            _on_signal(signal.SIGTERM, None)


def _on_signal(number: int, _: FrameType | None) -> None:
    if not _ending.acquire(blocking=False):  # the other is at it
        return
    try:
        write("signal")
    finally:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # SIG_DFL; python's own may only be set by the main thread
        os.kill(os.getpid(), number)


def _in_child() -> None:
    """A forked process has its own account, and nothing of its parent's in it."""
    global _written, _owner, began, _watching, _ending, _writing
    _written, _owner, began = False, os.getpid(), time.time()
    _ending, _writing = threading.Lock(), threading.RLock()
    if _watching:
        _watching = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for forget in _forget:
        forget()
