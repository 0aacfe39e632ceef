"""The process that runs steps on a CUDA device: `python -m bigdit.rehearse.card.worker`.

With REQUEST.json RESULT.json it answers this one, alone or as one of the ranks that torchrun started. Without, it
imports what steps need once, and reads a pair `REQUEST.json<tab>RESULT.json` a line; each is answered by a fork of its
own, which has a device that nothing was allocated on. That is for emulated cards alone: a real one does not survive a
fork.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from bigdit.dist import world_from_env
from bigdit.errors import guard
from bigdit.files import write_text
from bigdit.log import quiet_libraries
from bigdit.rehearse.request import RehearsalRequest


def main(arguments: list[str]) -> None:
    """Answer the one request, or one after another until there are no more."""
    quiet_libraries()
    if arguments:
        asked, answered = map(Path, arguments)
        answer(asked, answered)
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    _import()
    for line in sys.stdin:
        asked, answered = map(Path, line.rstrip("\n").split("\t"))
        status = _forked(asked, answered)
        print(f"{answered}\t{status}", file=answers, flush=True)


def answer(asked: Path, answered: Path) -> None:
    """Run the request's steps; the first rank writes the CardRun, whole or not at all."""
    from bigdit.rehearse.card.steps import run

    found = run(RehearsalRequest.model_validate_json(asked.read_text()))
    if world_from_env().is_main:
        write_text(answered, found.model_dump_json())


def _import() -> None:
    import torch

    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    import bigdit.encoders.frozen
    import bigdit.engines.deepspeed
    import bigdit.engines.fsdp2
    import bigdit.models.lora
    import bigdit.rehearse.card.steps  # noqa: F401


def _forked(asked: Path, answered: Path) -> int:
    child = os.fork()
    if child == 0:
        status = 3
        try:
            import torch

            torch.cuda._is_in_bad_fork = lambda: False  # there is no driver whose state a fork would break
            status = guard(lambda: answer(asked, answered))
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended)


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
