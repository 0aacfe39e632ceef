"""The process that answers: `python -m bigdit.profile LANE…`, on an emulated GPU (cards.py), by its forks (forks.py).

A model and its engine are made for each question and taken apart again. A fork whose GPU is not empty then answers no
more: no attempt runs beside what another one left. Neither does one that has recorded, and no fork changes its number
of processes: a process group is not taken apart, since engines keep what they made of it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from bigdit import libraries
from bigdit.errors import guard
from bigdit.lifeline import end_with
from bigdit.profile.attempt import Question
from bigdit.profile.forks import serve


def main(given: list[str]) -> None:
    """Answer until all lanes are closed."""
    end_with(os.getppid(), signal.SIGKILL)
    _import_all()
    serve(given, _import_for, _answer, _suits)


def _answer(line: str) -> tuple[str, bool]:
    question = Question.model_validate_json(line)
    from bigdit.profile.run_attempt import attempt, emptied, leave_values

    if not question.values:
        leave_values()
    if question.what == "recorded":
        from bigdit.profile.recorded import recorded

        return recorded(question.request, question.snapshot).model_dump_json(), False
    return attempt(question).model_dump_json(), emptied()


def _suits(line: str) -> bool:
    """Whether a fork that has answered others may answer this question."""
    import torch.distributed as dist

    question = Question.model_validate_json(line)
    if question.what == "recorded":
        return False
    strategy = question.request.strategy
    return strategy.engine == "single" or not dist.is_initialized() or dist.get_world_size() == strategy.world_size


def _import_all() -> None:
    """Import what all steps need. A real GPU would not survive a fork."""
    with libraries.importing(), libraries.models_alone():
        import torch

        import bigdit.profile.run_attempt  # noqa: F401

    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    torch.cuda.init()  # torch refuses to in a fork, since a real driver would
    torch.cuda._is_in_bad_fork = lambda: False  # there is no driver whose state a fork would break


def _import_for(line: str) -> None:
    """Import what the question's steps need beside that, once for all forks that begin from now on."""
    request = Question.model_validate_json(line).request
    with libraries.importing(), libraries.uncompiled():
        import diffusers
        import torch

        from bigdit import optim

        getattr(diffusers, request.model.class_name, None)
        strategy = request.strategy
        # Of one number: it imports the library that has the optimizer.
        optim.build(strategy.optimizer, [torch.zeros(1)], stochastic_rounding=strategy.precision == "bf16_sr")
        importlib.import_module(f"bigdit.engines.{strategy.engine}")
        if strategy.lora is not None:
            import bigdit.models.lora
        if request.encoders is not None:
            import bigdit.encoders.frozen  # noqa: F401


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
