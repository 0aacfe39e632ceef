"""Real processes of bigdit without the seconds of their imports: forked from this one, which has imported everything.

What runs in them are the doors of the command line, with a user's arguments; each is in a session of its own, with
files, signals and an environment of its own, as after an exec. Whatever a killed one leaves alive becomes a child of
this process, so that nothing is overlooked.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from bigdit import libraries
from bigdit.checkout import own_module
from bigdit.train.processes.signals import SIGNALS
from chaotic import moments

LIMIT_S = 400.0
"""No round waits longer for a process: DeepSpeed compiles its collectives at the first start on a machine."""
_AT_WORK = (
    "bigdit.cli",
    "bigdit.extract.preload",
    "bigdit.extract.extract",
    "bigdit.train.processes.launch",
    "bigdit.train.loop",
    "diffusers.models.transformers.sana_transformer",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_NO_FILE = 1 << 12


class ChaosError(AssertionError):
    """What a round saw that must not be."""


def warm() -> None:
    """Import what the doors import, and compute nothing: threads do not survive a fork."""
    libraries.prepare()
    for name in _AT_WORK:
        importlib.import_module(name)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["bigdit.extract.preload"])
    gc.collect()
    gc.freeze()  # what is never looked at again is not copied


def adopt_orphans() -> None:
    """Become the parent of what the processes of a round leave behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Door:
    """A command of bigdit that runs; its exit status is negative where a signal ended it."""

    def __init__(self, arguments: Sequence[object], log_file: Path, moment: moments.Moment | None = None) -> None:
        self.log = log_file
        self.arguments = [str(each) for each in arguments]
        self.pid = _fork(lambda: _command(self.arguments, moment), os.environ.copy(), log_file)
        self._status: int | None = None

    def status(self) -> int | None:
        """None while it runs."""
        if self._status is None:
            self._status = _ended(self.pid)
        return self._status

    def ends(self, within: float = LIMIT_S) -> int:
        """Its status, when nothing that it started is left."""
        until = time.monotonic() + within
        while self.status() is None:
            if time.monotonic() > until:
                left = kill_all()
                raise ChaosError(f"`bigdit {self.arguments[0]}` did not end within {within:g} s; killed {left}")
            time.sleep(0.002)
        return self.status() or 0

    def text(self) -> str:
        """What it and its processes said."""
        return self.log.read_text(errors="replace")


def none_left(within: float = 15.0) -> None:
    """Wait until no process of a round lives. Raises ChaosError where one does not end."""
    until = time.monotonic() + within
    while children():
        if time.monotonic() > until:
            raise ChaosError(f"{len(kill_all())} processes were left behind")
        time.sleep(0.002)


def children() -> list[int]:
    """The processes whose parent this is now, the dead ones reaped."""
    found = []
    for pid in _children_of(os.getpid()):
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                found.append(pid)
        except ChildProcessError:
            continue
    return found


def tree() -> list[int]:
    """All processes of a round, parents first."""
    found: list[int] = []
    waiting = _children_of(os.getpid())
    while waiting:
        pid = waiting.pop(0)
        found.append(pid)
        waiting += _children_of(pid)
    return found


def kill_all() -> list[int]:
    """Kill every process of a round; their ids."""
    killed = []
    while pids := tree():
        for pid in pids:
            send(pid, signal.SIGKILL)
        killed += [pid for pid in pids if pid not in killed]
        children()
        time.sleep(0.002)
    return killed


def stop_all(first: int | None = None) -> None:
    """Stop every process of a round (SIGSTOP); `first` is about to stop by itself."""
    while first is not None and _state(first) not in "TZX":
        time.sleep(0.0002)
    for _ in range(2):  # what a process started meanwhile
        for pid in tree():
            send(pid, signal.SIGSTOP)


def go_on() -> None:
    """Let every process of a round go on that was stopped."""
    for pid in tree():
        send(pid, signal.SIGCONT)


def send(pid: int, signum: int) -> None:
    """A signal, to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:  # it has ended
        pass
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _fork(action: Callable[[], int], environment: Mapping[str, str], log_file: Path | None = None) -> int:
    """A process that does `action` in a session of its own, and ends with its status."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the parent's handlers are not the child's
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return pid
    status: Any = 1
    try:
        os.setsid()
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _as_after_exec(environment, log_file)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        status = action()
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 1
    os._exit(status or 0)


def _as_after_exec(environment: Mapping[str, str], log_file: Path | None) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if log_file is not None:
        descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    os.closerange(3, _NO_FILE)
    os.environ.clear()
    os.environ.update(environment)


def _command(arguments: list[str], moment: moments.Moment | None) -> int:
    """What `bigdit ARGUMENTS` does; what it starts by its own launchers is forked too."""
    from bigdit import cli
    from bigdit.train.processes import launch

    launch.subprocess = _Forking(moment)  # type: ignore[attr-defined,assignment]
    multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[assignment]
    sys.argv[:] = sys.orig_argv[:] = ["bigdit", *arguments]
    if moment is not None and arguments[0] == "extract":
        moment.watch()
        forkserver.ensure_running()  # before torch has threads that its fork would lack
    cli.main(arguments)
    return 0


class _Forking:
    """In the place of the module subprocess, for the launcher."""

    def __init__(self, moment: moments.Moment | None) -> None:
        self.moment = moment

    def Popen(self, command: Sequence[str], *, env: Mapping[str, str], start_new_session: bool) -> Rank:
        return Rank(list(command[1 + len(own_module("")) :]), env, self.moment)


class Rank:
    """As subprocess.Popen of `python -m bigdit.train …`, as far as the launcher uses one."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], moment: moments.Moment | None) -> None:
        self.pid = _fork(lambda: _train(arguments, moment), environment)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ended(self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.002)
        return self.returncode or 0

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _train(arguments: list[str], moment: moments.Moment | None) -> int:
    from bigdit.train.main import main

    sys.argv[:] = sys.orig_argv[:] = ["bigdit.train", *arguments]
    if moment is not None and moment.rank == int(os.environ.get("RANK", "0")):
        moment.watch()
    return main(arguments)


def _spawn(path: bytes, arguments: Sequence[Any], kept: Sequence[int]) -> int:
    """As multiprocessing's spawnv_passfds, of the server of workers and what watches its resources."""
    code = str(arguments[-1])
    pid = os.fork()
    if pid:
        return pid
    status = 0
    try:
        last = 2
        for each in [*sorted(kept), _NO_FILE]:
            os.closerange(last + 1, each)
            last = each
        exec(code, {})
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)
