"""A process whose forks answer jobs in parallel. No torch is imported.

`Pool` is the client. `serve` is the server, which imports what jobs need. Its forks, the branches, each build once what
several jobs share. Each job runs in a fork of its branch. Slots run in parallel, the jobs of one slot in order. A slot
is a socket, and a file for stderr. The server sends these lines: `read` when it has a job, `fork<tab>PROCESS ID` when
the job's fork begins, `STATUS<tab>ANSWER`, and `end<tab>STATUS` when the fork has ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from bigdit.errors import EXIT_BUG, EXIT_USER, Killed, UserError, guard
from bigdit.processes import end_with
from bigdit.strategy import Strict

_CHUNK = 1 << 20
_LAST_LINES = 12
_ENDS_WITHIN_S = 10
"""Longest wait for a process that was killed."""

Started = Callable[[], tuple[list[str], dict[str, str]]]
"""Returns the command and the environment of the process. Its slots are added as arguments."""


class WorkerError(RuntimeError):
    """A process ended without an answer. The message has its exit status and error, then the end of its stderr.

    `why`: a line of that error.
    """

    why = ""


class WorkerEnded(WorkerError):
    """It ended without a Python exception."""


class WorkerKilled(WorkerEnded, Killed):
    """It was killed by SIGKILL, which is no bug."""


class Pool:
    """A process that has imported all libraries, whose forks answer jobs in `count` parallel slots.

    It starts with `start`, or with the first job. After `close` none starts.
    """

    def __init__(self, started: Started, count: int) -> None:
        self._over = False
        self._started = started
        # For stderr of the process and its forks: files without a name, which vanish at their end.
        self._stderr, *self._stderr_by = (tempfile.TemporaryFile() for _ in range(1 + count))  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        self._slots: list[_Slot] = []  # of this process
        self._lock = threading.Lock()

    def start(self) -> int:
        """Start the process, so that it imports libraries before the first job; its id."""
        return self._running()[0].pid

    def ask(self, slot: int, what: str, job: Strict, timeout_s: float) -> bytes:
        """The answer to a job in this slot. `what` names the job in messages.

        Raises TimeoutError after `timeout_s`, UserError for errors that the user can fix, and WorkerError if the fork
        or the process dies. The next job starts a new one.
        """
        stderr = self._stderr_by[slot]
        # Before the start: afterwards it may be dead already.
        before, before_all = (os.fstat(each.fileno()).st_size for each in (stderr, self._stderr))
        process, slots = self._running()
        own = slots[slot]
        try:
            with own.lock:
                status, answer = own.put(job, time.monotonic() + timeout_s)
        except TimeoutError:
            if not own.stop():
                self._end(process)
            raise
        except EOFError:
            own.close()
            ended = process.wait()
            self._end(process)
            raise failure(what, ended, _lines(self._stderr, before_all)) from None
        if status:
            raise failure(what, status, _lines(stderr, before))
        return answer

    def close(self) -> None:
        """End the process group of the process and its forks for good."""
        with self._lock:
            self._over, process = True, self._process
        if process is not None:
            self._end(process)

    def _running(self) -> tuple[subprocess.Popen[bytes], list[_Slot]]:
        with self._lock:
            if self._over:
                raise WorkerError("the processes that answer were ended")
            if self._process is None:
                self._process, self._slots = self._start()
            return self._process, self._slots

    def _start(self) -> tuple[subprocess.Popen[bytes], list[_Slot]]:
        command, environment = self._started()
        pairs = [socket.socketpair() for _ in self._stderr_by]
        files = [(theirs.fileno(), stderr.fileno()) for (_, theirs), stderr in zip(pairs, self._stderr_by, strict=True)]
        try:
            process = subprocess.Popen(
                [*command, *(f"{end}:{stderr}" for end, stderr in files)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env=environment,
                pass_fds=[number for pair in files for number in pair],
                start_new_session=True,  # Ctrl-C reaches only this process, which ends it
            )
        except OSError:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        return process, [_Slot(ours) for ours, _ in pairs]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._process is not process:
                return  # another slot has ended it, and perhaps started a new one
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for slot in self._slots:
                slot.await_end()
                if slot.lock.acquire(blocking=False):  # else a thread is asking, finds the end, and closes the slot
                    slot.close()
                    slot.lock.release()  # a thread that is about to ask finds it closed
            self._process, self._slots = None, []


class _Slot:
    """A slot of one process, and the fork that answers its job. The thread that asks holds `lock`."""

    def __init__(self, end: socket.socket) -> None:
        self.fork: int | None = None
        self.lock = threading.Lock()
        self._job_read = False
        self._socket = end
        self._unread = b""

    def close(self) -> None:
        self._socket.close()

    def await_end(self) -> None:
        """Wait until all processes have closed the other end. Killed forks hold it for a moment."""
        until = time.monotonic() + _ENDS_WITHIN_S
        with contextlib.suppress(TimeoutError, EOFError):
            while True:
                self._line(until)

    def put(self, job: Strict, until: float) -> tuple[int, bytes]:
        """The status of a job, and its answer. Raises TimeoutError, and EOFError if the process has ended."""
        self._job_read = False
        with contextlib.suppress(OSError):  # it has ended, which reading shows too
            self._socket.sendall(f"{job.model_dump_json()}\n".encode())
        while True:
            first, _, rest = self._line(until).partition(b"\t")
            if first == b"read":
                self._job_read = True
            elif first == b"fork":
                self.fork = int(rest)
            elif first == b"end":
                self.fork = None
                if self._job_read:  # else it is the fork of the job before
                    return int(rest), b""
            else:
                return int(first), rest

    def stop(self) -> bool:
        """Kill the fork of the job; False if there is none, or if its end is not confirmed."""
        if self.fork is None or not self._job_read:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.fork, signal.SIGKILL)
        try:
            while not self._line(time.monotonic() + _ENDS_WITHIN_S).startswith(b"end\t"):
                pass
        except (TimeoutError, EOFError):
            return False
        self.fork = None
        return True

    def _line(self, until: float) -> bytes:
        while b"\n" not in self._unread:
            try:
                poll = select.poll()  # select takes no descriptor beyond 1023
                poll.register(self._socket, select.POLLIN)
                ready = poll.poll(max(until - time.monotonic(), 0) * 1000)
                part = self._socket.recv(_CHUNK) if ready else None
            except (OSError, ValueError):  # the process was killed before it read all, or this end is closed
                part = b""
            if part is None:
                raise TimeoutError
            if not part:
                raise EOFError
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _lines(file: IO[bytes], since: int) -> list[str]:
    """The lines from that byte on. The position at which the process writes is not moved."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size - since, since).decode(errors="replace").splitlines()


def environment(*, expandable_segments: bool) -> dict[str, str]:
    """This process's environment without network and a launcher's ranks, and with this allocator setting."""
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTORCH_CUDA_ALLOC_CONF")
    own = {key: value for key, value in os.environ.items() if key not in left_out}
    return own | {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable_segments}", "HF_HUB_OFFLINE": "1"}


def failure(what: str, status: int, lines: list[str]) -> Exception:
    """The error of `what`, which left no result: the user's errors in the lines of stderr, or the last lines."""
    problems = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if status == EXIT_USER and problems:
        return UserError(*problems)
    end = "\n".join(lines[-_LAST_LINES:])
    raised = [line for line in lines if re.match(r"[\w.]+Error: ", line)]
    killed = status == -signal.SIGKILL
    kind = WorkerKilled if killed else WorkerError if raised else WorkerEnded
    reasons = [] if killed else raised or [line for line in lines if line.strip()]
    why = f" {reasons[-1][:300]}" if reasons else ""
    error = kind(f"{what} ended with status {status} and no result:{why}\n{end}")
    error.why = why.strip()
    return error


class _End:
    """One end of a socket for lines."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._unread, self.close = end, b"", end.close

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> list[str] | None:
        """The lines that have come; None if the other end is closed."""
        part = self._socket.recv(_CHUNK)
        *lines, self._unread = (self._unread + part).split(b"\n")
        return [line.decode() for line in lines] if part else None

    def send(self, *parts: object) -> None:
        with contextlib.suppress(OSError):  # the other end is closed, which reading shows too
            self._socket.sendall(("\t".join(map(str, parts)) + "\n").encode())


class _ServedSlot(_End):
    """The server's end of a slot, from its argument `SOCKET:FILE`, both descriptors."""

    def __init__(self, given: str) -> None:
        number, _, stderr = given.partition(":")
        super().__init__(socket.socket(fileno=int(number)))
        self.stderr = int(stderr)


@dataclass(frozen=True)
class Service:
    """What the server does with a job. `prepare` imports what it needs, in the server. Jobs with the same key `alike`
    share a branch: a fork of the server that has run `build`. `answer` runs in a fork of the branch."""

    prepare: Callable[[str], None]
    alike: Callable[[str], str]
    build: Callable[[str], None]
    answer: Callable[[str], str]


MOST_BRANCHES = 4
"""Most branches. Beyond that, the oldest idle one ends."""


def serve(given: Sequence[str], service: Service) -> None:
    """Answer the jobs of all slots, each in a fork, until the slots are closed.

    An exception of `prepare` or `build` is an answer too.
    """
    os.dup2(2, 1)  # libraries may print to stdout
    slots = [_ServedSlot(each) for each in given]
    free, branches = [*slots], dict[str, _Branch]()
    while free or any(branch.busy for branch in branches.values()):
        ready = select.select([*free, *branches.values()], [], [])[0]
        for slot in [slot for slot in free if slot in ready]:
            jobs = slot.read()
            if jobs is None:
                free.remove(slot)
            for job in jobs or ():  # one at a time
                slot.send("read")
                if _succeeds(slot, partial(service.prepare, job)):
                    free.remove(slot)
                    _branch_for(job, branches, service, slots).ask(slot, job)
        for key, branch in [(key, branch) for key, branch in branches.items() if branch in ready]:
            ended, lives = branch.ended()
            for slot, status in ended.items():
                slot.send("end", status)
                free.append(slot)
            if not lives:
                del branches[key]


class _Branch(_End):
    """The server's end of a branch. `busy` are slots whose job it has."""

    def __init__(self, end: socket.socket, process: int, slots: Sequence[_ServedSlot]) -> None:
        super().__init__(end)
        self._process, self._slots, self.busy = process, slots, set[_ServedSlot]()

    def ask(self, slot: _ServedSlot, job: str) -> None:
        self.busy.add(slot)
        self.send(self._slots.index(slot), job)

    def end(self) -> None:
        """End an idle branch."""
        self._socket.shutdown(socket.SHUT_WR)
        os.waitpid(self._process, 0)
        self.close()

    def ended(self) -> tuple[dict[_ServedSlot, int], bool]:
        """The status of forks that have ended, by slot, and whether the branch lives. Its forks end with it."""
        lines = self.read()
        if lines is None:
            self.close()
            status = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
            return dict.fromkeys(self.busy, status), False
        numbers = (map(int, line.split("\t")) for line in lines)
        ended = {self._slots[number]: status for number, status in numbers}
        self.busy -= ended.keys()
        return ended, True


def _branch_for(job: str, branches: dict[str, _Branch], service: Service, slots: Sequence[_ServedSlot]) -> _Branch:
    """The branch of this job, which becomes the newest. If there are too many, the oldest idle ones end."""
    key = service.alike(job)
    found = branches.pop(key, None)
    if found is None:
        idle = [each for each, branch in branches.items() if not branch.busy]
        for each in idle[: max(len(branches) + 1 - MOST_BRANCHES, 0)]:
            branches.pop(each).end()
        ours, theirs = socket.socketpair()
        found = _Branch(ours, _forked(partial(_serve_branch, _End(theirs), service, slots)), slots)
        theirs.close()
    branches[key] = found
    return found


def _serve_branch(server: _End, service: Service, slots: Sequence[_ServedSlot]) -> None:
    forks: dict[int, tuple[int, int]] = {}  # process and slot, by the pidfd of the process
    while True:
        ready = select.select([server.fileno(), *forks], [], [])[0]
        for life in [life for life in forks if life in ready]:
            child, number = forks.pop(life)
            os.close(life)
            server.send(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        lines = server.read() if server.fileno() in ready else []
        if lines is None:
            return
        for line in lines:
            asked, _, job = line.partition("\t")
            slot = slots[int(asked)]
            if not _succeeds(slot, partial(service.build, job)):
                server.send(asked, 0)
                continue
            life, held = os.pipe()
            gc.freeze()  # else a collection in the fork would touch, and so copy, all pages of this process
            forks[life] = _forked(partial(_answer, slot, job, service.answer)), int(asked)
            os.close(held)


def _answer(slot: _ServedSlot, job: str, answer: Callable[[str], str]) -> None:
    os.dup2(slot.stderr, 1)
    os.dup2(slot.stderr, 2)
    slot.send("fork", os.getpid())
    found: list[str] = []
    status = guard(lambda: found.append(answer(job)))
    sys.stderr.flush()
    slot.send(status, *(found or [""]))


def _forked(run: Callable[[], None]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = EXIT_BUG
    try:
        end_with(parent, signal.SIGKILL)
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # torch's shutdown would abort while backends or process groups exist


def _succeeds(slot: _ServedSlot, run: Callable[[], None]) -> bool:
    """Run it. An exception is the answer of the slot."""
    before = os.dup(2)
    os.dup2(slot.stderr, 2)
    status = guard(run)
    sys.stderr.flush()
    os.dup2(before, 2)
    os.close(before)
    if status:
        slot.send(status, "")
    return not status
