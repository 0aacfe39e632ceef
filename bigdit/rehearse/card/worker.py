"""The process that runs steps on a CUDA device: `python -m bigdit.rehearse.card.worker`.

With REQUEST.json RESULT.json it answers this one, alone or as one of the ranks that torchrun started. Without, it
reads a pair `REQUEST.json<tab>RESULT.json` a line; each is answered by a fork of its own, which has a device that
nothing was allocated on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bigdit import libraries
from bigdit.dist import world_from_env
from bigdit.errors import guard
from bigdit.files import write_text
from bigdit.rehearse.card.forks import ended, fork, import_for
from bigdit.rehearse.request import RehearsalRequest


def main(arguments: list[str]) -> None:
    """Answer the one request, or one after another until there are no more."""
    libraries.prepare()
    if arguments:
        asked, answered = map(Path, arguments)
        answer(RehearsalRequest.model_validate_json(asked.read_text()), answered)
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        asked, answered = map(Path, line.rstrip("\n").split("\t"))
        status = _forked(asked, answered)
        print(f"{answered}\t{status}", file=answers, flush=True)


def answer(request: RehearsalRequest, answered: Path) -> None:
    """Run the request's steps; the first rank writes the CardRun, whole or not at all."""
    from bigdit.rehearse.card.steps import run

    found = run(request)
    if world_from_env().is_main:
        write_text(answered, found.model_dump_json())


def _forked(asked: Path, answered: Path) -> int:
    request = RehearsalRequest.model_validate_json(asked.read_text())
    import_for(request)
    return ended(fork(lambda: answer(request, answered)))


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
