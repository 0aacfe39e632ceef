"""Start a run's processes on this machine, pass signals on to them, and end them all.

torchrun and DeepSpeed's launcher kill workers 30 s after a signal, and SIGUSR1 kills the launchers.
"""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from bigdit import log
from bigdit.errors import EXIT_USER
from bigdit.machine import memory_bytes
from bigdit.processes import STOPPED, state_of
from bigdit.train.processes.end import LAUNCHER, handled_signals
from bigdit.units import gib

# For the other processes to end by themselves when one has failed. Each waits up to three times 5 s before it ends: for
# a peer to end, for the store to answer, for others to read who was lost.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Meeting:
    """Where the processes of `nodes` machines connect: on the first one. `node_rank`: the number of this machine."""

    address: str
    port: int
    nodes: int = 1
    node_rank: int = 0


class Ranks:
    """The processes of a run on this machine, each in its own session: only their parent passes Ctrl-C on to them.

    `grace`: seconds that they have to save and end after a signal. `host_bytes`: the CPU memory that its plans need.
    `meeting`: of a run on several machines.
    """

    def __init__(
        self, command: Sequence[str], grace: float, host_bytes: int = 0, meeting: Meeting | None = None
    ) -> None:
        self._command = command
        self._meeting = meeting
        self._grace = grace
        self._host_bytes = host_bytes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped: list[int] = []
        self._signum = 0
        self._deadline = math.inf

    def run(self, count: int) -> int:
        """Start `count` processes and wait for them all. Returns 0, or the exit status of the first that failed."""
        before = {each: signal.signal(each, self._forward) for each in handled_signals()}
        try:
            if count > 1 and self._meeting is None:
                from torch.distributed import TCPStore  # here: importing torch takes seconds

                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # must outlive every rank
                self._meeting = Meeting("127.0.0.1", store.port)
            for local_rank in range(count):
                environment = os.environ | _environment(local_rank, count, self._meeting)
                self._processes.append(subprocess.Popen(self._command, env=environment, start_new_session=True))
            return self._wait()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            for process in self._alive():
                process.kill()

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        if not self._signum:
            self._signum = signum
            self._deadline = time.monotonic() + self._grace + PATIENCE_S
        for process in self._alive():
            process.send_signal(signum)

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]

    def _wait(self) -> int:
        failed: int | None = None
        killed: list[int] = []
        while alive := self._alive():
            if failed is None and (failed := self._failed()) is not None:
                self._deadline = min(self._deadline, time.monotonic() + PATIENCE_S)
            if time.monotonic() > self._deadline:
                killed = [self._processes.index(process) for process in alive]
                self._stopped = [rank for rank in killed if state_of(self._processes[rank].pid) in STOPPED]
                for process in alive:
                    process.kill()
                    process.wait()
            time.sleep(0.05)
        failed = self._failed() if failed is None else failed
        if failed is None:
            return 0
        self._report(failed, killed)
        status = self._processes[failed].returncode
        return status if status > 0 else 128 - status  # a signal, as a shell reports it

    def _failed(self) -> int | None:
        """The first rank that failed by itself. Ranks that end because another failed end with EXIT_USER."""
        failed = [rank for rank, process in enumerate(self._processes) if process.returncode]
        return min(failed, key=lambda rank: self._processes[rank].returncode == EXIT_USER, default=None)

    def _report(self, failed: int, killed: list[int]) -> None:
        """Log which rank was killed. A process that ends with a status has logged why.

        When a signal ends processes before there is anything to save, only the main one logs it.
        """
        statuses = [process.returncode for process in self._processes]
        if any(status > 0 and (rank == 0 or status < 128) for rank, status in enumerate(statuses)):
            return
        by = signal.Signals(-statuses[failed] if statuses[failed] < 0 else statuses[failed] - 128)
        others = [rank for rank in killed if rank not in (failed, *self._stopped)]
        end = f"; {self._ranks(others)} waited for it and had to be killed" if others else ""
        why, counted = "", "`bigdit plan` counts what the run takes"
        if by == signal.SIGKILL and failed not in killed:
            counted = f"its plan counts {gib(self._host_bytes)} of it" if self._host_bytes else counted
            why = f" (by hand, or because memory ran out: this machine has {gib(memory_bytes())}, and {counted})"
        pid = self._processes[failed].pid
        stopped = f"{self._ranks(self._stopped)}, which was stopped, did not answer; " if self._stopped else ""
        log.notice(f"error: {stopped}{self._ranks([failed])} (process {pid}) was ended by {by.name}{why}{end}")

    def _ranks(self, here: Sequence[int]) -> str:
        """Processes of this machine by their ranks in the run."""
        first = 0 if self._meeting is None else self._meeting.node_rank * len(self._processes)
        return f"rank{'s' * (len(here) > 1)} {', '.join(str(first + rank) for rank in here)}"


def _environment(local_rank: int, count: int, meeting: Meeting | None) -> dict[str, str]:
    """Variables that torchrun and DeepSpeed's launcher set for each process, and the id of this one."""
    own = {LAUNCHER: str(os.getpid())}
    if meeting is None:
        return own
    return own | {
        "RANK": str(meeting.node_rank * count + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(meeting.nodes * count),
        "LOCAL_WORLD_SIZE": str(count),
        "LOCAL_SIZE": str(count),
        "GROUP_WORLD_SIZE": str(meeting.nodes),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(meeting.nodes == 1),  # then this process holds the store, not rank 0
    }


def free_port() -> int:
    """A TCP port that is free now. Programs that take any port, such as torchrun, get none below 32768 (ip(7))."""
    while True:
        port = random.SystemRandom().randrange(16384, 32768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
