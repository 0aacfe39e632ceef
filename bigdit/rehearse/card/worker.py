"""The process that runs steps on a CUDA device: `python -m bigdit.rehearse.card.worker`.

With REQUEST.json RESULT.json it answers this one, alone or as one of the ranks that torchrun started; with STEPS it
times so many more, with BYTES torch may reserve no more than that. Without, it reads requests, a line of JSON each, and
writes `STATUS<tab>ANSWER` lines; each is answered by a fork of its own, which has a device that nothing was allocated
on.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path

from bigdit import libraries
from bigdit.dist import world_from_env
from bigdit.errors import UserError, guard
from bigdit.files import write_text
from bigdit.lifeline import end_with
from bigdit.rehearse.card.forks import ended, fork, import_for
from bigdit.rehearse.card.run import RAN_OUT, CardRun
from bigdit.rehearse.request import RehearsalRequest


def main(arguments: list[str]) -> None:
    """Answer the one request, or one after another until there are no more."""
    libraries.prepare()
    if arguments:
        asked, answered = map(Path, arguments[:2])
        found = _run(RehearsalRequest.model_validate_json(asked.read_text()), *map(int, arguments[2:]))
        if world_from_env().is_main:
            write_text(answered, found.model_dump_json())
        return
    end_with(os.getppid(), signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        request = RehearsalRequest.model_validate_json(line)
        import_for(request)
        status, answer = _forked(request)
        print(f"{status}\t{'' if status else answer}", file=answers, flush=True)


def _run(request: RehearsalRequest, timed_steps: int = 0, capacity_bytes: int = 0) -> CardRun:
    import torch

    from bigdit.rehearse.card.steps import run
    from bigdit.shortage import ran_out, shortage

    device = torch.device("cuda", world_from_env().local_rank)
    if capacity_bytes:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(capacity_bytes / total, 1.0), device)
    try:
        return run(request, timed_steps)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise UserError(f"{RAN_OUT}: {shortage(error, device)}") from error


def _forked(request: RehearsalRequest) -> tuple[int, str]:
    """How a fork ended, and what it found."""
    reading, writing = os.pipe()
    child = fork(functools.partial(_tell, request, writing))
    os.close(writing)
    with os.fdopen(reading) as said:
        answer = said.read()
    return ended(child), answer


def _tell(request: RehearsalRequest, writing: int) -> None:
    with os.fdopen(writing, "w") as file:
        file.write(_run(request).model_dump_json())


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
