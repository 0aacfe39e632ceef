"""Several extractions of one store, hung and vanished machines, and clocks that jump."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from dataclasses import replace

from bigdit.errors import UserError
from bigdit.extract.speed import read_units
from bigdit.store.in_hand import WorkerName, all_held, remove_left
from bigdit.store.part import part_path
from faulty.case import WORKERS, Case, attempt, check_never_half, check_whole
from faulty.kills import Killer, extractor


def two_at_once_round(case: Case, name: str) -> int:
    """Two extractions of the same store from its beginning; units that were encoded by both."""
    job = case.fresh(name, workers=1)
    both = [extractor(job) for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    check_whole(case, job)
    done = Counter((unit.start, unit.end) for units in read_units(job.data.features).values() for unit in units)
    shutil.rmtree(job.data.features)
    return sum(done.values()) - len(done)


def hung_round(case: Case, seed: int) -> None:
    """A worker that stops for a while, as a hung node does, and goes on when another extraction has done its part."""
    job = case.fresh(f"hung-{seed}", workers=1)
    hung = extractor(job)
    while hung.is_alive() and not any(held.marks for held in all_held(job.data.features)):
        time.sleep(0.001)
    time.sleep(random.Random(seed).uniform(0, case.seconds / 2))
    os.killpg(hung.pid or 0, signal.SIGSTOP)
    stopped = [held.worker.pid for held in all_held(job.data.features)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    attempt(job)
    check_never_half(case, job)
    assert not job.left()
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    os.killpg(hung.pid or 0, signal.SIGCONT)
    hung.join()
    assert hung.exitcode == 0
    check_whole(case, job)
    shutil.rmtree(job.data.features)


def clock_round(case: Case, seed: int) -> None:
    """Kill as above while every file's times are set to 1980 and 2100 by turns."""
    job, generator = case.fresh(f"clock-{seed}"), random.Random(seed)
    over = threading.Event()

    def set_times() -> None:
        while not over.wait(0.005):
            moment = generator.choice([315532800, 4102444800])
            for file in job.data.features.rglob("*"):
                with contextlib.suppress(OSError):
                    os.utime(file, (moment, moment))

    clock = threading.Thread(target=set_times)
    clock.start()
    try:
        with Killer(job.data.features, seed, case.seconds * 0.7, 1):
            while job.left():
                with contextlib.suppress(UserError):
                    attempt(job)
                check_never_half(case, job)
    finally:
        over.set()
        clock.join()
    check_whole(case, job)
    shutil.rmtree(job.data.features)


def vanished_round(case: Case, seed: int) -> None:
    """Folders of another machine's workers, with half-written parts: worked around, kept, removed on demand."""
    job, generator = case.fresh(f"vanished-{seed}"), random.Random(seed)
    root = job.data.features
    folders = []
    for each in generator.sample(job.ranges(), 4):
        worker = replace(WorkerName.here(), host="node-that-is-gone", boot="0123456789ab")
        folder = root / WORKERS / str(worker)
        folder.mkdir(parents=True)
        name = part_path(root, *each).name
        whole = case.parts[name]
        (folder / name).write_bytes(whole[: generator.randrange(len(whole))])
        folders.append(folder)
    attempt(job)
    check_whole(case, job)
    held = all_held(root)
    assert sorted(each.folder for each in held) == sorted(folders)
    assert {each.fate for each in held} == {"unknown"}
    remove_left(root, other_machines=True)
    assert all_held(root) == []
    shutil.rmtree(root)
