"""Writes the account once, however the process ends: by itself, an error, a signal, its last step, or by exec."""

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
"""The name of this process's files, once it uses a GPU."""

_written = False
_watching = False
_owner = os.getpid()
_ending = threading.Lock()
_writing = threading.RLock()
_exit = os._exit
_account: Callable[[str, float], None] | None = None
_forget: Sequence[Callable[[], None]] = ()


def install(account: Callable[[str, float], None], forget: Sequence[Callable[[], None]]) -> None:
    """Call this first, so that it runs last at exit.

    `account` is called with how the process ended, and its seconds. `forget` is called in a forked process.
    """
    global _account, _forget
    _account, _forget = account, forget
    atexit.register(lambda: write("exit"))
    os.register_at_fork(after_in_child=_in_child)
    os._exit = leave  # type: ignore[assignment]
    os.execv, os.execve = _wrap_exec(os.execv), _wrap_exec(os.execve)  # os's other exec functions call these


def begin() -> None:
    """This process uses a GPU from now on. After exec, it has another name than the program before."""
    global name
    name = f"{os.getpid()}-{parent.count(f'begun-{os.getpid()}-*.json')}"
    parent.write_json(f"begun-{name}.json", {"argv": sys.argv, "rank": os.environ.get("RANK")})
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        _watch_for_termination()


def note_crowd(gpus: int) -> None:
    """Report if a launcher started more processes on this machine than there are GPUs."""
    counts = [os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")]
    processes = max((int(count) for count in counts if count.isdigit()), default=1)
    if processes > gpus:
        parent.write_json(f"crowd-{os.getpid()}.json", {"processes": processes})


def refuse(reason: str) -> None:
    """End a process that cannot be emulated, with exit status 1. `bigdit emulate` logs `reason`, a line, at its end."""
    parent.write_json(f"refused-{os.getpid()}.json", {"reason": reason})
    if not parent.OUT:  # no parent reads the file
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
    os._exit(1)


def end_after_steps() -> None:
    """End at once with status 0: all steps are done."""
    write("steps")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            stream.flush()
    _exit(0)


def leave(status: int) -> Any:
    """os._exit, after the account."""
    write("exit")
    _exit(status)


def _wrap_exec(become: Callable[..., Any]) -> Callable[..., Any]:
    """exec, after the account. If exec fails, this program writes its account again later."""

    def after_the_account(*args: Any) -> Any:
        global _written
        write("exec")
        try:
            return become(*args)
        finally:
            _written = False

    return after_the_account


def write(how: str) -> None:
    """Write the account of this process, once. Other threads wait meanwhile."""
    global _written
    with _writing:
        if _written or os.getpid() != _owner:
            return
        _written = True
        if _account is not None:
            _account(how, time.time() - began)


def _watch_for_termination() -> None:
    """On SIGTERM, write the account and end by it, in python's handler or in a thread, whichever is first.

    A launcher sends SIGTERM to processes that wait for a failed peer. They wait in C++, where python's handler does not
    run. A pipe wakes the thread at once.
    """
    global _watching
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:  # the script has its own
        signal.set_wakeup_fd(before)
        return
    _watching = True
    signal.signal(signal.SIGTERM, _on_signal)
    threading.Thread(target=_end_on_signal, args=(reader,), daemon=True, name="bigdit-ending").start()


def _end_on_signal(reader: int) -> None:
    while True:
        number = os.read(reader, 1)
        if number == bytes([signal.SIGTERM]) and signal.getsignal(signal.SIGTERM) is _on_signal:
            _on_signal(signal.SIGTERM, None)


def _on_signal(number: int, _: FrameType | None) -> None:
    if not _ending.acquire(blocking=False):  # the other one is writing
        return
    try:
        write("signal")
    finally:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # SIG_DFL; python's signal() works in the main thread only
        os.kill(os.getpid(), number)


def _in_child() -> None:
    """A forked process has its own, empty account."""
    global _written, _owner, began, _watching, _ending, _writing
    _written, _owner, began = False, os.getpid(), time.time()
    _ending, _writing = threading.Lock(), threading.RLock()
    if _watching:
        _watching = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for forget in _forget:
        forget()
