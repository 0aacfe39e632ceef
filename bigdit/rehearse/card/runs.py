"""The process that traces steps: `python -m bigdit.rehearse.card.runs LANE…`, each by a fork of its own (forks.py)."""

from __future__ import annotations

import os
import sys

from bigdit.errors import guard
from bigdit.rehearse.card.imports import import_all, import_for
from bigdit.rehearse.card.worker import run
from bigdit.rehearse.forks import serve, taken
from bigdit.rehearse.request import RehearsalRequest


def main(given: list[str]) -> None:
    """Answer until all lanes are closed."""
    lanes = taken(given)
    import_all()
    serve(lanes, lambda line: import_for(_request(line)), _answer)


def _answer(line: str) -> tuple[str, bool]:
    return run(_request(line)).model_dump_json(), False


def _request(line: str) -> RehearsalRequest:
    return RehearsalRequest.model_validate_json(line)


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
