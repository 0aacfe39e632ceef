"""How training stops: on a signal, with a checkpoint, after a step that all processes agree on; or, where a process is
lost, all at once, with one line of the first that knows."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bigdit.dist import World
from bigdit.errors import EXIT_USER, UserError, refused
from bigdit.processes import ENDED, STOPPED, state_of
from bigdit.train.processes.end import SIGNALS, heeded

# One Ctrl-C may come twice, from the terminal and from a launcher.
ONE_PRESS_S = 0.5


class Stopped(Exception):
    """Training ended on a signal, after `step` steps that are saved in `checkpoint`."""

    def __init__(self, signum: int, step: int, checkpoint: Path) -> None:
        super().__init__(
            f"{signal.Signals(signum).name}: saved {checkpoint}; the same command resumes from step {step}"
        )
        self.status = 128 + signum  # as a shell reports it


class Stop:
    """Whether a signal asks for the end, and the processes' agreement on it.

    Before the first step there is nothing to save, and the process ends at once. So it does at a second Ctrl-C, and
    `grace` seconds after the signal.
    """

    def __init__(self, grace: float, world: World) -> None:
        self.step = 0  # how many were taken
        self._grace = grace
        self._world = world
        self.signum = 0  # the first that this process got
        self._training = False
        self.limit_s = math.inf  # how long a process may take to answer another
        self._groups: list[dist.ProcessGroup] = []
        self._group: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        self._wake = -1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals. A thread hears them while the main one waits for a device or a peer."""
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

        They agree through CPU memory, so that none waits for its device.
        """
        self.step = step
        if self._world.world_size > 1:
            self._group = dist.new_group(backend="gloo")
            self._groups = list(dist.distributed_c10d._world.pg_map)
            self._store = dist.PrefixStore("stopped", dist.distributed_c10d._get_default_store())
        self._training = True

    def answer_within(self, seconds: float) -> None:
        """From here on a process waits that long for another, in every group that was made before `begin`."""
        self.limit_s = seconds
        c10d: Any = dist.distributed_c10d
        set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # torch 2.15 has the first
        for group in self._groups:
            set_timeout(timedelta(seconds=seconds), group)

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

    def end_after_main(self) -> None:
        """Wait, after training has ended, until the main process is done too, within the grace.

        It writes the run's page last, and srun and torchrun kill all when one has ended with a status other than 0.
        """
        if self._store is None:
            return
        with suppress(RuntimeError):  # the store has ended with the main process
            if self._world.is_main:
                self._store.set("main", "")
            else:
                self._store.wait(["main"], timedelta(seconds=self._grace))

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


T = TypeVar("T")

# How long a process may take to end, or to note that it lost a peer too, after another's connections broke.
PATIENCE_S = 5.0
# Parts of the errors of gloo, NCCL and torch's store where another process has ended, or does not answer.
SIGNS = (
    "gloo/transport",
    "connection closed",
    "connection reset",
    "connection was",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process",
    "failed to recv",
)


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process runs. Process ids are those of one `namespace` of one `host`."""

    host: str
    namespace: str
    pid: int

    @classmethod
    def here(cls) -> ProcessPlace:
        return cls(socket.gethostname(), os.readlink("/proc/self/ns/pid"), os.getpid())

    def state(self, here: ProcessPlace) -> str:
        """The process's `state_of`, or nothing for one of another machine."""
        return state_of(self.pid) if (self.host, self.namespace) == (here.host, here.namespace) else ""


@contextmanager
def ending_together(world: World, stop: Stop, timeout: float) -> Iterator[None]:
    """Inside a process group: one process prints an error that all have; a process prints its own.

    Where a peer has ended, or has not answered for `timeout` seconds, or for what `stop.answer_within` says, this
    process prints which, and ends at once: what waits for a device cannot be taken down.
    """
    if world.world_size == 1:
        yield
        return
    stop.limit_s, met = timeout, dist.distributed_c10d._get_default_store()
    store = _Store(dist.PrefixStore("bigdit", met))
    places: list[ProcessPlace] = []  # empty until all have sent theirs: one may be lost before

    def silent(rank: int) -> None:
        own = _Store(dist.PrefixStore("bigdit", met.clone()))
        if own.first("a peer", True):
            _print_lost(_unanswered([rank], own, places, stop), stop)
        own.leave_word(world.rank)
        os._exit(EXIT_USER)

    try:
        found = [ProcessPlace.here()] * world.world_size
        dist.all_gather_object(found, ProcessPlace.here())
        places = found
        with Pulse(dist.PrefixStore("bigdit", met), world, lambda: stop.limit_s, silent):
            yield
    except Exception as error:
        problems = error.problems if isinstance(error, UserError) else tuple(filter(None, [refused(error)]))
        for problem in problems:
            if store.first(problem, world.is_main):
                _print_error(problem)
        store.leave_word(world.rank)
        if problems:
            raise UserError() from error
        if not isinstance(error, RuntimeError) or not any(sign in str(error).lower() for sign in SIGNS):
            raise
        gone = _gone(places)
        if not any(store.has_word(rank) for rank in gone) and store.first("a peer", True):
            lost = f"{_names(gone, places)} was lost" if gone else _silent(store, places, world, stop, error)
            _print_lost(lost, stop)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_USER)


def _print_error(problem: str) -> None:
    print(f"error: {problem}", file=sys.stderr)


def _print_lost(lost: str, stop: Stop) -> None:
    _print_error(f"{lost} after step {stop.step}: all end; the same command resumes from the last checkpoint")
    sys.stderr.flush()


class _Store:
    """The store by which the processes meet. Its own process may have ended, or not answer."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.answers = True

    def first(self, what: str, alone: bool) -> bool:
        """Whether this process is the first to report it; `alone` where the store does not answer."""
        return self._ask(lambda: bool(self._store.add(f"reported/{what}", 1) == 1), alone)

    def leave_word(self, rank: int) -> None:
        """Note that this process ends; it, or another one, reports why."""
        self._ask(lambda: bool(self._store.add(f"ended/{rank}", 1)), False)

    def has_word(self, rank: int) -> bool:
        """Whether that process has noted its end."""
        return self._ask(lambda: bool(self._store.check([f"ended/{rank}"])), False)

    def place(self, rank: int) -> str | None:
        """Where that process's main thread was last, as far as it told."""
        return self._ask(lambda: last_place(self._store, rank), None)

    def _ask(self, request: Callable[[], T], otherwise: T) -> T:
        """Its answer. A store that does not answer within the patience is not asked again, since torch sets no
        limit."""
        heard: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                heard.append(request())

        if self.answers:
            asking = threading.Thread(target=ask, daemon=True)
            try:
                asking.start()
                asking.join(PATIENCE_S)
            except RuntimeError:  # the system starts no more threads
                ask()
            self.answers = bool(heard)
        return heard[0] if heard else otherwise


def _silent(store: _Store, places: list[ProcessPlace], world: World, stop: Stop, error: Exception) -> str:
    """The ranks that did not answer: those that are stopped, else those that noted no end."""
    here = ProcessPlace.here()
    silent = [rank for rank in range(len(places)) if not store.has_word(rank)]
    if not store.answers:  # rank 0 holds it, or a launcher does, which no rank can name
        silent = [0] if places and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ else []
    stopped = [rank for rank, place in enumerate(places) if place.state(here) in STOPPED]
    if stopped or silent:
        return _unanswered(stopped or silent, store, places, stop)
    found = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return f"of {world.world_size} processes one on another machine, or one that does not answer ({found}), was lost"


def _unanswered(ranks: list[int], store: _Store, places: list[ProcessPlace], stop: Stop) -> str:
    here = ProcessPlace.here()
    state = ", which is stopped," if places[ranks[0]].state(here) in STOPPED else ""
    last = ", ".join(place for rank in ranks if (place := store.place(rank)))
    seen = f", last seen at {last}," if last else ""
    return f"{_names(ranks, places)}{state} did not answer for {stop.limit_s:g} s (train.timeout){seen}"


def _names(ranks: list[int], places: list[ProcessPlace]) -> str:
    return ", ".join(f"rank {rank} (process {places[rank].pid} on {places[rank].host})" for rank in ranks)


def _gone(places: list[ProcessPlace]) -> list[int]:
    """The ranks of this machine that have ended."""
    here, deadline = ProcessPlace.here(), time.monotonic() + PATIENCE_S
    while True:
        gone = [rank for rank, place in enumerate(places) if place.state(here) in ENDED]
        if gone or not places or time.monotonic() > deadline:
            return gone
        time.sleep(0.05)


EVERY_S = 2.0
_PACKAGE = Path(__file__).parents[2]
_AROUND = str(_PACKAGE / "train" / "monitor" / "seconds.py")  # its frames surround every collective
_LEFT = "left"


class Pulse:
    """Each process tells the run's store, every few seconds, where its main thread is, and watches the next rank for
    that. `silent(rank)` is called, once, where that rank has not told anything for `limit()` seconds.

    So a process that stops answering is named with the line it was last at. One whose threads all stand still, or whose
    machine does, is found even where the others wait for a GPU, which no error reaches.
    """

    def __init__(
        self, store: dist.Store, world: World, limit: Callable[[], float], silent: Callable[[int], None]
    ) -> None:
        """`store`: the one by which the processes meet. A connection of its own does not wait for the main thread."""
        own = store.clone()
        own.set_timeout(timedelta(seconds=60))
        self._store = dist.PrefixStore("pulse", own)
        self._world, self._limit, self._silent = world, limit, silent
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(EVERY_S)

    def _run(self) -> None:
        own, watched = str(self._world.rank), (self._world.rank + 1) % self._world.world_size
        beats, before, since = 0, "", 0
        try:
            while True:
                every = min(EVERY_S, self._limit() / 4)
                beats += 1
                self._store.set(own, f"{beats} {_place(sys._current_frames().get(self._main or 0))}")
                found = self._store.get(str(watched)).decode() if self._store.check([str(watched)]) else ""
                if found != before:
                    before, since = found, beats
                # Counted in beats: none passes while this process is stopped too.
                elif found not in ("", _LEFT) and (beats - since) * every > self._limit():
                    self._silent(watched)
                    return
                if self._over.wait(every):
                    self._store.set(own, _LEFT)
                    return
        except RuntimeError:  # the store has ended, or does not answer
            return


def last_place(store: dist.Store, rank: int) -> str | None:
    """Where that rank's main thread was last, as `file:line (function)`; None where it told nothing."""
    key = f"pulse/{rank}"
    found = store.get(key).decode() if store.check([key]) else ""
    return found.partition(" ")[2] or None


def _place(frame: FrameType | None) -> str:
    """The innermost frame of bigdit, else the innermost of all."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if Path(file).is_relative_to(_PACKAGE) and file != _AROUND:
            return f"{Path(file).relative_to(_PACKAGE.parent)}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "" if innermost is None else f"{innermost.f_code.co_filename}:{innermost.f_lineno}"
