"""A process whose forks answer side by side, each for itself. None is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from commands import ROOT

from bigdit.errors import UserError
from bigdit.profile.pool import MOST_BRANCHES, Pool, WorkerError
from bigdit.strategy import Strict

SERVER = """
import json, os, signal, sys, time
from bigdit.errors import UserError
from bigdit.profile.pool import Service, serve

def prepare(line):
    if json.loads(line)["what"] == "cannot be prepared":
        raise UserError("there is no such library")

built = []

def build(line):
    asked = json.loads(line)["what"]
    if asked == "cannot be built":
        raise UserError("there is no such model")
    if asked == "builder killed":
        os.kill(os.getpid(), signal.SIGKILL)
    built.append(asked)

def answer(line):
    asked = json.loads(line)["what"]
    print("what a library prints")
    if asked == "sleep":
        time.sleep(60)
    if asked == "killed":
        print("about to be killed", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if asked == "wrong":
        raise UserError("this is wrong", "and that")
    if asked == "bug":
        raise RuntimeError("of ours")
    if asked.startswith("built"):
        asked = ", ".join(built)
    return f"{asked} by {os.getpid()}"

serve(sys.argv[1:], Service(prepare, lambda line: json.loads(line)["what"][:7], build, answer))
"""


class Asked(Strict):
    """Requests to the server of these tests."""

    what: str


def forks(pool: Pool) -> list[int | None]:
    """The process that answers in each slot, None for an empty one."""
    return [slot.fork for slot in pool._slots] or [None] * 2


@pytest.fixture
def pool() -> Iterator[Pool]:
    server = [sys.executable, "-c", SERVER], os.environ | {"PYTHONPATH": str(ROOT)}
    with closing(Pool(lambda: server, 2)) as found:
        yield found


def ask(pool: Pool, slot: int, what: str, timeout_s: float = 20.0) -> tuple[str, int]:
    """The answer, and the process that gave it."""
    text, _, pid = pool.ask(slot, "the job", Asked(what=what), timeout_s).decode().partition(" by ")
    return text, int(pid)


def until(reached: Callable[[], bool]) -> None:
    last = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < last
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether the process has ended: a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_each_question_has_a_fork_of_its_own(pool: Pool) -> None:
    texts, forks = zip(
        *(ask(pool, slot, what) for slot, what in ((0, "one"), (1, "two"), (0, "x" * 300_000))), strict=True
    )
    assert texts == ("one", "two", "x" * 300_000)
    assert len({*forks, pool.start()}) == 4


def test_what_questions_have_alike_is_built_once_and_apart_from_others(pool: Pool) -> None:
    kinds = [f"built {number}" for number in range(MOST_BRANCHES + 2)]
    first = [ask(pool, number % 2, kind)[0] for number, kind in enumerate(kinds)]
    assert first == kinds
    assert ask(pool, 0, f"{kinds[-1]} more")[0] == f"{kinds[-1]}, {kinds[-1]} more"
    assert ask(pool, 0, kinds[0])[0] == kinds[0]  # its branch had to end


@pytest.mark.parametrize(
    ("what", "error", "printed"),
    [
        (
            "killed",
            WorkerError,
            f"^the job ended with status {-signal.SIGKILL} and no result:\n.*\nabout",
        ),
        ("bug", WorkerError, "^the job ended with status 3 and no result:(.|\n)*RuntimeError: of ours"),
        ("wrong", UserError, "^this is wrong; and that$"),
        ("cannot be prepared", UserError, "^there is no such library$"),
        ("cannot be built", UserError, "^there is no such model$"),
        ("builder killed", WorkerError, f"^the job ended with status {-signal.SIGKILL} and no result:"),
    ],
)
def test_what_ends_one_fork_disturbs_no_other_and_the_next_question_has_another(
    pool: Pool, what: str, error: type[Exception], printed: str
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=printed):
            ask(pool, 0, what)
    assert [ask(pool, slot, "one")[0] for slot in (0, 1)] == ["one", "one"]


def test_one_that_takes_too_long_is_stopped_alone(pool: Pool) -> None:
    with ThreadPoolExecutor(1) as aside:
        slow = aside.submit(ask, pool, 0, "sleep", 1.0)
        until(lambda: forks(pool)[:1] != [None])
        fork, process = forks(pool)[0], pool.start()
        assert ask(pool, 1, "two")[0] == "two"
        with pytest.raises(TimeoutError):
            slow.result()
    until(lambda: gone(fork or 0))
    assert (ask(pool, 0, "one")[0], pool.start()) == ("one", process)


def test_a_process_that_is_killed_takes_its_forks_along_and_the_next_question_starts_another(pool: Pool) -> None:
    with ThreadPoolExecutor(2) as aside:
        waiting = [aside.submit(ask, pool, slot, "sleep") for slot in (0, 1)]
        until(lambda: None not in forks(pool))
        ended = [fork or 0 for fork in forks(pool)]
        os.kill(pool.start(), signal.SIGKILL)
        until(lambda: all(map(gone, ended)))
        for each in waiting:
            with pytest.raises(WorkerError, match=f"^the job ended with status {-signal.SIGKILL} and no result"):
                each.result()
    assert ask(pool, 1, "two")[0] == "two"


def test_a_process_that_is_killed_is_reported_to_all_that_wait_for_it(pool: Pool) -> None:
    with ThreadPoolExecutor(2) as aside:
        for _ in range(10):
            waiting = [aside.submit(ask, pool, slot, "sleep") for slot in (0, 1)]
            until(lambda: None not in forks(pool))
            os.kill(pool.start(), signal.SIGKILL)
            for each in waiting:
                with pytest.raises(WorkerError, match=f"^the job ended with status {-signal.SIGKILL} and"):
                    each.result()
    assert ask(pool, 1, "two")[0] == "two"


def test_nothing_is_left_when_it_ends(pool: Pool) -> None:
    processes = [ask(pool, 0, "one")[1], pool.start()]
    with ThreadPoolExecutor(1) as aside:
        asked = aside.submit(ask, pool, 1, "sleep")
        until(lambda: forks(pool)[1] is not None)
        processes.append(forks(pool)[1] or 0)
        pool.close()
        with pytest.raises(WorkerError):
            asked.result()
    until(lambda: all(map(gone, processes)))
    with pytest.raises(WorkerError, match="were ended"):  # a thread that asks late restarts none
        ask(pool, 0, "one")


@pytest.mark.timeout(60, method="thread")  # who waits for a lock hears nothing else
def test_a_process_that_ends_before_all_have_asked_is_reported_to_those_that_ask_late() -> None:
    with closing(Pool(lambda: (["false"], dict(os.environ)), 8)) as pool, ThreadPoolExecutor(8) as aside:
        for _ in range(100):
            for each in [aside.submit(ask, pool, slot, "one") for slot in range(8)]:
                with pytest.raises(WorkerError, match=r"^the job ended with status 1 and no"):
                    each.result()
