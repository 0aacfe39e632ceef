"""How training stops. On a signal: with a checkpoint, after a step that all processes agree on. When a process is lost:
all at once, with one error message."""

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
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from bigdit.dist import World, launcher_holds_store
from bigdit.errors import EXIT_USER, UserError, refused
from bigdit.processes import ENDED, STOPPED, state_of
from bigdit.train.processes.end import LAUNCHER, SIGNALS, handled_signals

ONE_PRESS_S = 0.5  # one Ctrl-C may arrive twice: from the terminal and from a launcher


class Stopped(Exception):
    """A signal ended training after `step` steps, which `checkpoint` holds."""

    def __init__(self, signum: int, step: int, checkpoint: Path) -> None:
        super().__init__(
            f"{signal.Signals(signum).name}: saved {checkpoint}; the same command resumes from step {step}"
        )
        self.status = 128 + signum  # as a shell reports it


class Stop:
    """Receives signals, and lets all processes agree on the step after which they stop.

    The process ends at once before the first step, at a second Ctrl-C, and `grace` seconds after the signal.
    """

    def __init__(self, grace: float, world: World) -> None:
        self.step = 0  # finished steps
        self._grace = grace
        self._world = world
        self.signum = 0  # the first signal that this process received
        self._training = False
        self.limit_s = math.inf  # seconds that a process may take to answer another
        self._groups: list[dist.ProcessGroup] = []
        self._group: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        self._wake = -1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals, in a thread: the main one may wait for a device or another process."""
        pipe, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        before = {each: signal.signal(each, lambda *_: None) for each in handled_signals()}
        wake_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(pipe,), daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wake_before)
            for each, handler in before.items():
                signal.signal(each, handler)
            os.close(self._wake)
            self._wake = -1
            listener.join()
            os.close(pipe)

    def begin(self, step: int) -> None:
        """Begin training at `step`: from now on there is something to save. All processes call this.

        They agree through gloo, so that none waits for its GPU.
        """
        self.step = step
        if self._world.world_size > 1:
            self._group = dist.new_group(backend="gloo")
            self._groups = list(dist.distributed_c10d._world.pg_map)
            self._store = dist.PrefixStore("stopped", dist.distributed_c10d._get_default_store())
        self._training = True

    def answer_within(self, seconds: float) -> None:
        """Set how long a process waits for another, in every process group that existed before `begin`."""
        self.limit_s = seconds
        c10d: Any = dist.distributed_c10d
        set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # torch 2.15 has the first
        for group in self._groups:
            set_timeout(timedelta(seconds=seconds), group)

    def asked(self, step: int) -> int:
        """The signal that ends training after `step` steps, or 0. All processes call this, and get the same number."""
        self.step = step
        if self._group is None:
            return self.signum
        signum = torch.tensor(self.signum)
        dist.all_reduce(signum, dist.ReduceOp.MAX, group=self._group)
        if not self.signum and signum and self._wake >= 0:
            os.write(self._wake, bytes([int(signum)]))  # as if this process had received the signal
        return int(signum)

    def end_after_main(self) -> None:
        """Wait until the main process is done too, for the grace at most.

        It writes the run's page last. srun and torchrun kill all processes when one ends with a status other than 0.
        """
        if self._store is None:
            return
        with suppress(RuntimeError):  # the store ended with the main process
            if self._world.is_main:
                self._store.set("main", "")
            else:
                self._store.wait(["main"], timedelta(seconds=self._grace))

    def _listen(self, pipe: int) -> None:
        since, deadline = 0.0, math.inf
        while True:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                self._leave(f"the grace of {self._grace:g} s ran out before a checkpoint was saved (train.grace)")
            received = os.read(pipe, 1)
            if not received:
                return
            signum, now = received[0], time.monotonic()
            if signum not in SIGNALS:
                continue
            if not self.signum:
                self.signum, since, deadline = signum, now, now + self._grace
                if not self._training:
                    self._leave("ended before a step was taken")
            elif signum == self.signum == signal.SIGINT and now > since + ONE_PRESS_S:
                self._leave("ended at once, without a checkpoint")

    def _leave(self, why: str) -> None:
        """End this process now, even if its main thread waits."""
        if self._world.is_main:
            print(f"{signal.Signals(self.signum).name}: {why}; step {self.step}", file=sys.stderr, flush=True)
        os._exit(128 + self.signum)


T = TypeVar("T")

# After a connection broke: how long the other process may take to end, or to note that it lost a connection too.
PATIENCE_S = 5.0
# Parts of messages of gloo, NCCL and torch's store about another process that ended or does not answer.
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
    """Where a process runs. A `pid` is valid in one `namespace` of one `host`."""

    host: str
    namespace: str
    pid: int

    @classmethod
    def here(cls) -> ProcessPlace:
        return cls(socket.gethostname(), os.readlink("/proc/self/ns/pid"), os.getpid())

    def state(self, here: ProcessPlace) -> str:
        """The process's `state_of`; empty for another machine."""
        return state_of(self.pid) if (self.host, self.namespace) == (here.host, here.namespace) else ""


@contextmanager
def ending_together(world: World, stop: Stop, timeout: float) -> Iterator[None]:
    """Print each error once inside a process group, and end all processes when one is lost.

    A process is lost when it ended, or did not answer for `timeout` seconds (later: for those of `stop.answer_within`).
    Then this process ends at once: a thread that waits for a device cannot be stopped otherwise.
    """
    if world.world_size == 1:
        yield
        return
    stop.limit_s, default = timeout, dist.distributed_c10d._get_default_store()
    store = _Store(dist.PrefixStore("bigdit", default))
    places: list[ProcessPlace] = []  # empty until all have sent theirs: one may be lost before

    def end_for(rank: int) -> None:
        own = _Store(dist.PrefixStore("bigdit", default.clone()))
        if own.is_first_to_report("a lost process", True):
            _print_lost(_unanswered([rank], own, places, stop), stop)
        own.note_end(world.rank)
        _end()

    try:
        found = [ProcessPlace.here()] * world.world_size
        dist.all_gather_object(found, ProcessPlace.here())
        places = found
        with Pulse(dist.PrefixStore("bigdit", default), world, lambda: stop.limit_s, end_for):
            yield
    except Exception as error:
        problems = error.problems if isinstance(error, UserError) else tuple(filter(None, [refused(error)]))
        for problem in problems:
            if store.is_first_to_report(problem, world.is_main):
                print(f"error: {problem}", file=sys.stderr)
        store.note_end(world.rank)
        if problems:
            raise UserError() from error
        if not isinstance(error, RuntimeError) or not any(sign in str(error).lower() for sign in SIGNS):
            raise
        ended = _ended_ranks(places)
        noted = any(store.noted_end(rank) for rank in ended)
        if not store.answers and 0 in ended:
            ended = [0]  # it held the store; the others end because of it
        here, before = ProcessPlace.here(), places[world.rank - world.local_rank : world.rank]
        speaks = all(place.state(here) in (*ENDED, *STOPPED) for place in before)  # the first here that can
        if not noted and store.is_first_to_report("a lost process", speaks):
            were = "was" if len(ended) == 1 else "were"
            lost = f"{_names(ended, places)} {were} lost" if ended else _silent(store, places, world, stop, error)
            _print_lost(lost, stop)
        _end()


def _end() -> NoReturn:
    """End this process now. If no launcher holds the store, the others first see who was lost, and what is reported."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0 if launcher_holds_store() else PATIENCE_S)
    os._exit(EXIT_USER)


def _print_lost(lost: str, stop: Stop) -> None:
    end = f"after step {stop.step}: all end; the same command resumes from the last checkpoint"
    print(f"error: {lost} {end}", file=sys.stderr, flush=True)


class _Store:
    """The store that all processes share. The process that holds it may have ended, or may not answer."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.answers = True

    def is_first_to_report(self, problem: str, default: bool) -> bool:
        """Whether this process is the first to report it, on this machine if `bigdit train` was started on each;
        `default` if the store does not answer."""
        machine = f"{socket.gethostname()} {os.environ[LAUNCHER]}" if LAUNCHER in os.environ else ""
        return self._ask(lambda: bool(self._store.add(f"reported/{machine}/{problem}", 1) == 1), default)

    def note_end(self, rank: int) -> None:
        """Note that this process ends, and that its reason is reported."""
        self._ask(lambda: bool(self._store.add(f"ended/{rank}", 1)), False)

    def noted_end(self, rank: int) -> bool:
        """Whether that process noted its end."""
        return self._ask(lambda: bool(self._store.check([f"ended/{rank}"])), False)

    def place(self, rank: int) -> str | None:
        """Where that process's main thread was last seen; None if unknown."""
        return self._ask(lambda: last_place(self._store, rank), None)

    def _ask(self, request: Callable[[], T], default: T) -> T:
        """The store's answer. torch sets no limit, so a store that did not answer once is not asked again."""
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(request())

        if self.answers:
            asking = threading.Thread(target=ask, daemon=True)
            try:
                asking.start()
                asking.join(PATIENCE_S)
            except RuntimeError:  # the system starts no more threads
                ask()
            self.answers = bool(answers)
        return answers[0] if answers else default


def _silent(store: _Store, places: list[ProcessPlace], world: World, stop: Stop, error: Exception) -> str:
    """Name the ranks that did not answer: those that are stopped, else those that noted no end."""
    here = ProcessPlace.here()
    silent = [rank for rank in range(len(places)) if not store.noted_end(rank)]
    if not store.answers:  # rank 0 holds the store, or a launcher does, which has no rank
        silent = [0] if places and not launcher_holds_store() else []
    stopped = [rank for rank, place in enumerate(places) if place.state(here) in STOPPED]
    if stopped or silent:
        return _unanswered(stopped or silent, store, places, stop)
    found = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return f"one of {world.world_size} processes, on another machine or without an answer ({found}), was lost"


def _unanswered(ranks: list[int], store: _Store, places: list[ProcessPlace], stop: Stop) -> str:
    here = ProcessPlace.here()
    is_or_are = "is" if len(ranks) == 1 else "are"
    state = f", which {is_or_are} stopped," if places[ranks[0]].state(here) in STOPPED else ""
    last = ", ".join(place for rank in ranks if (place := store.place(rank)))
    seen = f", last seen at {last}," if last else ""
    return f"{_names(ranks, places)}{state} did not answer for {stop.limit_s:g} s (train.timeout){seen}"


def _names(ranks: list[int], places: list[ProcessPlace]) -> str:
    return ", ".join(f"rank {rank} (process {places[rank].pid} on {places[rank].host})" for rank in ranks)


def _ended_ranks(places: list[ProcessPlace]) -> list[int]:
    """The ranks on this machine that have ended, or will within the patience."""
    here, deadline = ProcessPlace.here(), time.monotonic() + PATIENCE_S
    while True:
        ended = [rank for rank, place in enumerate(places) if place.state(here) in ENDED]
        if ended or not places or time.monotonic() > deadline:
            return ended
        time.sleep(0.05)


EVERY_S = 2.0
_PACKAGE = Path(__file__).parents[2]
_TIMER = str(_PACKAGE / "train" / "monitor" / "seconds.py")  # its frames surround every collective
_LEFT = "left"


class Pulse:
    """Writes to the run's store, every few seconds, where this process's main thread is, and reads the next rank's.

    Calls `silent(rank)` once when that rank has written nothing for `limit()` seconds. So an error names the line that
    a process was last at. A process or machine that stands still is found even while the others wait for a GPU.
    """

    def __init__(
        self, store: dist.Store, world: World, limit: Callable[[], float], silent: Callable[[int], None]
    ) -> None:
        """`store`: the one that the processes share."""
        own = store.clone()  # its own connection does not wait for the main thread
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
                # Beats, not seconds: this process may have been stopped too.
                elif found not in ("", _LEFT) and (beats - since) * every > self._limit():
                    self._silent(watched)
                    return
                if self._over.wait(every):
                    self._store.set(own, _LEFT)
                    return
        except RuntimeError:  # the store ended, or does not answer
            return


def last_place(store: dist.Store, rank: int) -> str | None:
    """Where that rank's main thread was last, as `file:line (function)`; None if it wrote nothing."""
    key = f"pulse/{rank}"
    found = store.get(key).decode() if store.check([key]) else ""
    return found.partition(" ")[2] or None


def _place(frame: FrameType | None) -> str:
    """bigdit's innermost frame, else the innermost of all."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if Path(file).is_relative_to(_PACKAGE) and file != _TIMER:
            return f"{Path(file).relative_to(_PACKAGE.parent)}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "" if innermost is None else f"{innermost.f_code.co_filename}:{innermost.f_lineno}"
