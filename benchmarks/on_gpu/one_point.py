"""Run one point of the matrix on this machine's GPU: REQUEST.json RESULT.json STEPS. It imports, and waits for a
line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bigdit import libraries
from bigdit.errors import guard
from bigdit.files import write_text
from bigdit.profile.attempt import StepRequest
from bigdit.profile.measured.steps import run


def main(asked: Path, answered: Path, steps: int) -> None:
    if not sys.stdin.readline():  # the asking process has ended
        return
    found = run(StepRequest.model_validate_json(asked.read_text()), steps)
    write_text(answered, found.model_dump_json())


if __name__ == "__main__":
    libraries.prepare()
    status = guard(lambda: main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
