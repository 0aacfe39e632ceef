"""The process that answers attempts, one after another: `python -m bigdit.rehearse.card.attempts`.

It reads a pair `ASKED.json<tab>ANSWER.json` a line, and a fork answers: a model and its engine are made for each and
taken apart again. A fork whose card is not empty then is asked no more: none is answered beside what another one left.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import TextIO

from bigdit.errors import guard
from bigdit.files import write_text
from bigdit.rehearse.card.attempt import Asked
from bigdit.rehearse.card.forks import ended, fork, import_for

_LEFT_BEHIND = 4
"""The status of an answer that holds, and is the last one of its fork, whose card is not empty."""


def main() -> None:
    """Answer one question after another, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    card = None
    for line in sys.stdin:
        asked, answered = map(Path, line.rstrip("\n").split("\t"))
        import_for(Asked.model_validate_json(asked.read_text()).request)
        card = card or _Card(answers)
        status = card.answer(line)
        if status:
            card = None
        print(f"{answered}\t{0 if status == _LEFT_BEHIND else status}", file=answers, flush=True)


class _Card:
    """A fork with a card that nothing was allocated on, which answers until one attempt leaves something there."""

    def __init__(self, answers: TextIO) -> None:
        questions, self._ask = os.pipe()
        said, status = os.pipe()
        others = (self._ask, said, answers.fileno())
        self._child = fork(functools.partial(_serve, questions, status, others))
        os.close(questions)
        os.close(status)
        self._said = os.fdopen(said)

    def answer(self, line: str) -> int:
        """The status of this question; where it is not 0, the fork has ended."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its status says how
            os.write(self._ask, line.encode())
        said = self._said.readline()
        if said == "0\n":
            return 0
        os.close(self._ask)
        self._said.close()
        status = ended(self._child)
        return int(said) if said else status


def _serve(questions: int, status: int, others: tuple[int, ...]) -> None:
    """Answer until there are no more questions, with a status a line. `others` are the files of the one that asks,
    whose end is to be heard."""
    for file in others:
        os.close(file)
    for line in os.fdopen(questions):
        came_to = guard(functools.partial(_answer, line))
        os.write(status, f"{came_to}\n".encode())
        if came_to:
            return


def _answer(line: str) -> int:
    from bigdit.rehearse.card.one_attempt import attempt, emptied

    asked, answered = map(Path, line.rstrip("\n").split("\t"))
    question = Asked.model_validate_json(asked.read_text())
    write_text(answered, attempt(question.request, question.capacity_bytes).model_dump_json())
    return 0 if emptied() else _LEFT_BEHIND


if __name__ == "__main__":
    sys.exit(guard(main))
