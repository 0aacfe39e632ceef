"""The process that answers attempts, one after another: `python -m bigdit.rehearse.card.attempts`.

It reads questions, a line of JSON each, and writes `STATUS<tab>ANSWER` lines. A fork answers: a model and its engine
are made for each question and taken apart again. A fork whose card is not empty then is asked no more: none is answered
beside what another one left.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO

from bigdit.errors import guard
from bigdit.lifeline import end_with
from bigdit.rehearse.card.attempt import Asked
from bigdit.rehearse.card.forks import ended, fork, import_for

_LEFT_BEHIND = 4
"""The status of an answer that holds, and is the last one of its fork, whose card is not empty."""


def main() -> None:
    """Answer one question after another, until there are no more."""
    end_with(os.getppid(), signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    card = None
    for line in sys.stdin:
        import_for(Asked.model_validate_json(line).request)
        card = card or _Card(answers)
        status, answer = card.answer(line)
        if status:
            card = None
        print(f"{0 if status == _LEFT_BEHIND else status}\t{answer}", file=answers, flush=True)


class _Card:
    """A fork with a card that nothing was allocated on, which answers until one attempt leaves something there."""

    def __init__(self, answers: TextIO) -> None:
        questions, self._ask = os.pipe()
        said, answered = os.pipe()
        others = (self._ask, said, answers.fileno())
        self._child = fork(functools.partial(_serve, questions, answered, others))
        os.close(questions)
        os.close(answered)
        self._said = os.fdopen(said)

    def answer(self, line: str) -> tuple[int, str]:
        """The status of this question, and its answer; where the status is not 0, the fork has ended."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its status says how
            os.write(self._ask, line.encode())
        said = self._said.readline()
        status, _, answer = said.rstrip("\n").partition("\t")
        if status == "0":
            return 0, answer
        os.close(self._ask)
        self._said.close()
        last = ended(self._child)
        return (int(status), answer) if status else (last, "")


def _serve(questions: int, answered: int, others: tuple[int, ...]) -> None:
    """Answer until there are no more questions. `others` are the files of the one that asks, whose end is to be
    heard."""
    for file in others:
        os.close(file)
    with os.fdopen(questions) as lines, os.fdopen(answered, "w") as answers:
        for line in lines:
            found: list[str] = []
            status = guard(functools.partial(_answer, line, found.append))
            print(f"{status}\t{''.join(found)}", file=answers, flush=True)
            if status:
                return


def _answer(line: str, found: Callable[[str], None]) -> int:
    from bigdit.rehearse.card.one_attempt import attempt, emptied

    question = Asked.model_validate_json(line)
    found(attempt(question.request, question.capacity_bytes).model_dump_json())
    return 0 if emptied() else _LEFT_BEHIND


if __name__ == "__main__":
    sys.exit(guard(main))
