"""Signals that end training in order: after a step on which all processes agree, with a checkpoint."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from bigdit.dist import World
from bigdit.train.processes.signals import SIGNALS, heeded

# One Ctrl-C may come twice, from the terminal and from a launcher.
ONE_PRESS_S = 0.5


class Stopped(Exception):
    """Training ended in order, by a signal, after `step` steps that are saved in `checkpoint`."""

    def __init__(self, signum: int, step: int, checkpoint: Path) -> None:
        super().__init__(
            f"{signal.Signals(signum).name}: saved {checkpoint}; the same command goes on from step {step}"
        )
        self.status = 128 + signum  # as a shell reports it


class Stop:
    """Whether a signal asks for the end, and the processes' agreement on it.

    Before the first step there is nothing to save, and the process ends at once. A second Ctrl-C ends it at once too,
    and so does the end of `grace` seconds after the signal.
    """

    def __init__(self, grace: float, world: World) -> None:
        self.step = 0  # how many were taken
        self._grace = grace
        self._world = world
        self.signum = 0  # the first that this process got
        self._training = False
        self._group: dist.ProcessGroup | None = None
        self._wake = -1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals that come. A thread hears them while the main one waits for a device or a peer."""
        hear, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        before = {each: signal.signal(each, lambda *_: None) for each in heeded()}
        woken = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(hear,), daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            for each, handler in before.items():
                signal.signal(each, handler)
            os.close(self._wake)
            self._wake = -1
            listener.join()
            os.close(hear)

    def begin(self, step: int) -> None:
        """Training begins at `step`: from here on there is something to save. All processes call this.

        They agree through the host's memory, so that none waits for its device.
        """
        self.step = step
        if self._world.world_size > 1:
            self._group = dist.new_group(backend="gloo")
        self._training = True

    def asked(self, step: int) -> int:
        """The signal after which training ends here, with `step` steps taken, or 0; the same on all processes."""
        self.step = step
        if self._group is None:
            return self.signum
        signum = torch.tensor(self.signum)
        dist.all_reduce(signum, dist.ReduceOp.MAX, group=self._group)
        if not self.signum and signum:
            self._hear(int(signum))
        return int(signum)

    def _hear(self, signum: int) -> None:
        """As if this process had got the signal that another one got."""
        if self._wake >= 0:
            os.write(self._wake, bytes([signum]))

    def _listen(self, hear: int) -> None:
        since, deadline = 0.0, math.inf
        while True:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            if not select.select([hear], [], [], left)[0]:
                self._leave(f"the grace of {self._grace:g} s ran out before a checkpoint was saved (train.grace)")
            heard = os.read(hear, 1)
            if not heard:
                return
            signum, now = heard[0], time.monotonic()
            if signum not in SIGNALS:
                continue
            if not self.signum:
                self.signum, since, deadline = signum, now, now + self._grace
                if not self._training:
                    self._leave("ended before a step was taken")
            elif signum == self.signum == signal.SIGINT and now > since + ONE_PRESS_S:
                self._leave("ended at once, without a checkpoint")

    def _leave(self, why: str) -> None:
        """End this process now, whatever its main thread waits for."""
        if self._world.is_main:
            print(f"{signal.Signals(self.signum).name}: {why}; step {self.step}", file=sys.stderr, flush=True)
        os._exit(128 + self.signum)
