"""A live page as `bigdit whatif` hands it out, from a server in a thread of this process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bigdit.live.answers import Answers
from bigdit.live.serve import listening, prepared

from bigdit.search.asking.ask import question_for
from bigdit.search.question import Question

ADAMW, LOSSY = "one process, AdamW", "one process, CAME, bf16 without masters"
USABLE_MIB = 1340
"""Of the served page's cards: too little for some of what is asked."""
WITHIN_S = 120


def question(**changes: Any) -> Question:
    """That of the plan of tests/commands/test_plan.py, which is kept."""
    return question_for("dit-s-8", "rtx-3060", reserve=0, images="10k", global_batch=64, device="rehearsed", **changes)


def body(strategy: str, size: int, blocks: int) -> dict[str, Any]:
    """What the page asks."""
    sizes = {"micro_batch_size": size, "checkpointed_blocks": blocks}
    return {"strategy": strategy, "card": "NVIDIA GeForce RTX 3060"} | sizes


class Answer(NamedTuple):
    """Its status, its headers, and what it holds."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Served(NamedTuple):
    """The address with its token, and what answers behind it."""

    url: str
    answers: Answers

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def path(self) -> str:
        return urlsplit(self.url).path

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str | None) -> Answer:
        """What a client gets that sends these headers beside the usual ones, or without those that are None."""
        usual: dict[str, str | None] = {"Host": self.host}
        if method == "POST":
            usual |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        given = usual | {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(self.host, timeout=120)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            found = connection.getresponse()
            return Answer(
                found.status, {name.lower(): value for name, value in found.getheaders()}, found.read().decode()
            )
        finally:
            connection.close()

    def post(self, kind: str, asked: dict[str, Any]) -> Any:
        """The answer to what the page asks."""
        answer = self.ask("POST", f"{self.path}{kind}", json.dumps(asked).encode())
        assert answer.status == 200, answer
        return answer.json


@contextmanager
def served(page: str, answers: Answers) -> Iterator[Served]:
    """The server, until the `with` block ends."""
    with answers, listening(None) as at:
        server, url = prepared(page, answers, at)
        thread = threading.Thread(target=lambda: server.run(sockets=[at]))
        thread.start()
        try:
            yield Served(url, answers)
        finally:
            server.should_exit = True
            thread.join()


def stopped(live: Served, ask: Callable[[], object]) -> int:
    """The process that a question begins, of a number of cards that was not asked for before; it does nothing from then
    on."""
    (card,) = live.answers.cards.values()
    before = {*card.lanes.forks}
    ask()
    until = time.monotonic() + WITHIN_S
    while not (new := {*card.lanes.forks} - before):
        assert time.monotonic() < until
        time.sleep(0.005)
    (fork,) = new
    assert fork is not None
    os.kill(fork, signal.SIGSTOP)
    return fork
