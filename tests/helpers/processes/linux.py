"""Linux system calls for cloned test processes: their parent, and what /proc shows of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP, _PR_GET_TID_ADDRESS = 1, 35, 14, 40

_shown: list[mmap.mmap] = []

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock, as a fork must

_libc.sbrk.restype = ctypes.c_uint64
_libc.syscall.restype = ctypes.c_long


class _Map(ctypes.Structure):
    """`struct prctl_mm_map`: what /proc shows of a process's memory."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        *(("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32)),
    ]


def clone_beside() -> int:
    """Fork, but make the new process a child of this one's parent. Returns its id, and 0 in it."""
    address = ctypes.c_uint64()
    _checked(_libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0))  # libc keeps the thread's id there
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    tid = ctypes.c_void_p(address.value)
    ctypes.pythonapi.PyOS_BeforeFork()
    # The order of the last two arguments, thread storage and that address, depends on the architecture.
    last = (tid, 0) if platform.machine() == "x86_64" else (0, tid)
    pid = _libc.syscall(ctypes.c_long(_CLONE[platform.machine()]), ctypes.c_ulong(flags), 0, 0, *last)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _checked(pid)


def end_with_parent() -> None:
    """Let this process be killed when the thread that forked it ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def show(words: Iterable[str], environment: Mapping[str, str]) -> None:
    """Make /proc/PID/cmdline and environ show these."""
    reported = [_strings(words), _strings(f"{name}={value}" for name, value in environment.items())]
    kept = mmap.mmap(
        -1, sum(map(len, reported)) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # other mappings are not shown
    kept.write(b"\0".join(reported))
    start = ctypes.addressof(ctypes.c_char.from_buffer(kept))
    # proc_pid_stat(5) counts its fields from 1.
    field = dict(enumerate(Path("/proc/self/stat").read_text().rpartition(")")[2].split(), start=3))
    middle = start + len(reported[0])
    here = _Map(
        start_code=int(field[26]), end_code=int(field[27]), start_data=int(field[45]), end_data=int(field[46]),
        start_brk=int(field[47]), brk=_libc.sbrk(0), start_stack=int(field[28]),
        arg_start=start, arg_end=middle, env_start=middle + 1, env_end=middle + 1 + len(reported[1]),
        auxv=0, auxv_size=0, exe_fd=2**32 - 1,
    )  # fmt: skip
    _checked(_libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(here), ctypes.sizeof(here), 0))
    _shown.append(kept)  # the kernel reads it for as long as the process lives


def _strings(words: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
