"""The process whose forks answer: it imports and builds what they need, once, and each begins where it stands.

Questions come by lanes, which are answered side by side, one question after another in each. A lane is a socket and a
file for what is said beside answers. What goes back by the socket, a line each: `read` for each question that somebody
has read, `fork<tab>PROCESS ID` when its fork begins, `STATUS<tab>ANSWER`, and `end<tab>STATUS` when the fork has ended.
`lanes.py` is the other end.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from bigdit.die_with_parent import end_with
from bigdit.errors import EXIT_BUG, guard

Answer = Callable[[str], str]
"""The answer to a question."""

_CHUNK = 1 << 20


class Lane:
    """One lane as this process was given it: `SOCKET:FILE`, by their descriptors."""

    def __init__(self, given: str) -> None:
        number, _, said = given.partition(":")
        self.socket = socket.socket(fileno=int(number))
        self.said = int(said)

    def ask(self) -> str:
        """The next question; empty where the lane is closed. One comes at a time."""
        question = b""
        while not question.endswith(b"\n"):
            part = self.socket.recv(_CHUNK)
            if not part:
                return ""
            question += part
        self.tell("read")
        return question.decode()

    def tell(self, *parts: object) -> None:
        with suppress(BrokenPipeError):  # who asked has gone
            self.socket.sendall(("\t".join(map(str, parts)) + "\n").encode())


def serve(given: Sequence[str], prepare: Callable[[str], None], answer: Answer) -> None:
    """Answer the questions of all lanes that this process was given, each in a fork, until they are closed.

    `prepare` imports and builds what a question needs before its fork begins; what it raises is the answer.
    """
    os.dup2(2, 1)  # what libraries print is no answer
    free, forks = [Lane(each) for each in given], dict[int, tuple[int, Lane]]()
    while free or forks:
        ready = select.select([*(lane.socket.fileno() for lane in free), *forks], [], [])[0]
        for lane in [lane for lane in free if lane.socket.fileno() in ready]:
            question = lane.ask()
            if not question:
                free.remove(lane)
            elif _prepared(lane, prepare, question):
                free.remove(lane)
                life, child = _fork(lane, question, answer)
                forks[life] = child, lane
        for life in [life for life in forks if life in ready]:
            child, lane = forks.pop(life)
            os.close(life)
            lane.tell("end", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            free.append(lane)


def _prepared(lane: Lane, prepare: Callable[[str], None], question: str) -> bool:
    before = os.dup(2)
    os.dup2(lane.said, 2)
    status = guard(partial(prepare, question))
    sys.stderr.flush()
    os.dup2(before, 2)
    os.close(before)
    if status:
        lane.tell(status, "")
    return not status


def _fork(lane: Lane, question: str, answer: Answer) -> tuple[int, int]:
    """What can be read when the fork that answers this question has ended, and its process."""
    life, held = os.pipe()
    server = os.getpid()
    gc.freeze()  # its collections do not look through, and so copy, what is there already
    child = os.fork()
    if child:
        os.close(held)
        return life, child
    status = EXIT_BUG
    try:
        end_with(server, signal.SIGKILL)
        os.dup2(lane.said, 1)
        os.dup2(lane.said, 2)
        lane.tell("fork", os.getpid())
        found: list[str] = []
        said = guard(lambda: found.append(answer(question)))
        sys.stderr.flush()
        lane.tell(said, *(found or [""]))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # without torch's shutdown, which aborts where backends or process groups are still there
