"""Workers and whole extractions that are killed at random moments, until they have come through."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from bigdit import log
from bigdit.errors import UserError
from bigdit.extract.job import Job
from bigdit.store.in_hand import all_held
from faulty.case import Case, attempt, check_never_half, check_whole

KILLS = 3  # of a round at most
_PLACES = {False: "while encoding", True: "while writing"}


class Killer:
    """Kills random workers of this process at random moments, `limit` of them at most, while the block lasts."""

    def __init__(self, root: Path, seed: int, span_s: float, limit: int) -> None:
        self.where: Counter[str] = Counter()
        self._root, self._random, self._span_s, self._limit = root, random.Random(seed), span_s, limit
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while self._limit > self.where.total():
            at_work = self._random.random() < 0.8  # starting takes longer than working, and has less to lose
            if self._over.wait(self._random.uniform(0, 0.1 if at_work else self._span_s)):
                return
            marked = {held.worker.pid for held in all_held(self._root) if held.marks}
            living = [each.pid or 0 for each in multiprocessing.active_children() if each.name.startswith("extract-")]
            victims = [pid for pid in living if pid in marked or not at_work]
            if victims:
                self._kill(self._random.choice(victims))

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # to see where it is
            sizes = [held.nbytes for held in all_held(self._root) if held.worker.pid == pid and held.marks]
            os.kill(pid, signal.SIGKILL)
            self.where["while starting or between units" if not sizes else _PLACES[sizes[0] > 0]] += 1


def kill_round(case: Case, seed: int) -> tuple[Counter[str], int]:
    """Extract with two workers that are killed, again and again until it is done; where they were, and attempts."""
    job = case.fresh(f"killed-{seed}")
    attempts = 0
    with Killer(job.data.features, seed, case.seconds * 0.7, KILLS) as killer:
        while job.left():
            attempts += 1
            with contextlib.suppress(UserError):
                attempt(job)
            check_never_half(case, job)
    check_whole(case, job)
    shutil.rmtree(job.data.features)
    return killer.where, attempts


def _extractor(job: Job) -> None:
    log.err.quiet = True
    attempt(job)


def extractor(job: Job) -> ForkServerProcess:
    """A whole extraction in a process of its own, in a group of its own with its workers."""
    process = multiprocessing.get_context("forkserver").Process(target=_in_group, args=(job,))
    process.start()
    return process


def _in_group(job: Job) -> None:
    os.setpgid(0, 0)
    _extractor(job)


def kill_all_round(case: Case, seed: int, kills: int = KILLS) -> int:
    """Kill the extraction itself, with or without its workers, until it has come through; its attempts."""
    job, generator = case.fresh(f"all-{seed}", workers=2), random.Random(seed)
    attempts = 0
    while job.left():
        process = extractor(job)
        attempts += 1
        before = len(job.left())
        while process.is_alive() and len(job.left()) == before:  # starting takes seconds, and is of no interest
            time.sleep(0.001)
        if attempts <= kills:
            time.sleep(generator.uniform(0, case.seconds / 2))
            with contextlib.suppress(ProcessLookupError):
                if generator.random() < 0.5:
                    os.killpg(process.pid or 0, signal.SIGKILL)
                else:
                    os.kill(process.pid or 0, signal.SIGKILL)  # its workers end when they find it gone
        process.join()
        check_never_half(case, job)
    _wait_for_workers(job.data.features)
    check_whole(case, job)
    shutil.rmtree(job.data.features)
    return attempts


def _wait_for_workers(root: Path, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while any(held.fate == "alive" for held in all_held(root)) and time.monotonic() < until:
        time.sleep(0.01)
