"""The process that answers attempts: `python -m bigdit.rehearse.card.attempts LANE…`, whose forks answer (forks.py).

A model and its engine are made for each question and taken apart again. A fork whose card is not empty then is asked no
more: none is answered beside what another one left. Nor is a question of another number of processes: a process group
is not taken apart, since engines keep what they made of it.
"""

from __future__ import annotations

import os
import sys

from bigdit.errors import guard
from bigdit.rehearse.card.attempt import Asked
from bigdit.rehearse.card.imports import import_all, import_for, import_for_plans
from bigdit.rehearse.forks import serve, taken


def main(given: list[str]) -> None:
    """Answer until all lanes are closed."""
    lanes = taken(given)
    import_all()
    import_for_plans()
    serve(lanes, lambda line: import_for(Asked.model_validate_json(line).request), _answer, _suits)


def _answer(line: str) -> tuple[str, bool]:
    from bigdit.rehearse.card.one_attempt import attempt, emptied, leave_values

    question = Asked.model_validate_json(line)
    if not question.values:
        leave_values()
    return attempt(question).model_dump_json(), emptied()


def _suits(line: str) -> bool:
    """Whether it needs no process group, or the one that there is."""
    import torch.distributed as dist

    strategy = Asked.model_validate_json(line).request.strategy
    return strategy.engine == "single" or not dist.is_initialized() or dist.get_world_size() == strategy.world_size


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
