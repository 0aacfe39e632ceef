"""One question after another, answered by a thread; of those that wait, the newest alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class DroppedError(Exception):
    """A newer question was asked before this one had begun."""


class Newest(Generic[Question, Answer]):
    """Asks `answer` one question at a time. One that has begun is answered to its end; where another one comes while
    one waits, that one is dropped."""

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        self._answer = answer
        self._waiting: tuple[Question, Future[Answer]] | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, question: Question) -> Future[Answer]:
        """The answer to come, or what it raised; DroppedError for one that has not begun when the next one comes."""
        future: Future[Answer] = Future()
        with self._changed:
            before, self._waiting = self._waiting, (question, future)
            self._changed.notify()
        if before is not None and before[1].set_running_or_notify_cancel():
            before[1].set_exception(DroppedError("a newer question was asked before this one had begun"))
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                assert self._waiting is not None
                (question, future), self._waiting = self._waiting, None
            if not future.set_running_or_notify_cancel():
                continue  # who asked has gone
            try:
                found = self._answer(question)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(found)
