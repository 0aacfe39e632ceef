"""The process that answers: `python -m bigdit.profile LANE…`, on an emulated GPU (cards.py), by its forks (pool.py).

A model is built once for all questions that have it. Each question has a fork of its own, which begins with that model
and a GPU that has nothing.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from bigdit import libraries
from bigdit.die_with_parent import end_with
from bigdit.errors import guard
from bigdit.profile.attempt import Question, StepRequest
from bigdit.profile.pool import serve

if TYPE_CHECKING:
    from bigdit.profile.steps import Built

_built: dict[str, tuple[Built, int]] = {}
"""The last model, by what requests have alike, and the bytes of the host that it takes."""


def main(given: list[str]) -> None:
    """Answer until all lanes are closed."""
    end_with(os.getppid(), signal.SIGKILL)
    _import_all()
    serve(given, _prepare, _answer)


def _prepare(line: str) -> None:
    """Import and build what the question's steps need, once for all forks that begin from now on."""
    request = Question.model_validate_json(line).request
    _import_for(request)
    if request.part == "steps":
        key = _alike(request)
        if key not in _built:
            _built.clear()
            gc.unfreeze()  # pool.py froze it
            gc.collect()  # two may be more mappings than a process may have
            _built[key] = _build(request)


def _build(request: StepRequest) -> tuple[Built, int]:
    """What stands on the host, and how many bytes it takes there."""
    from bigdit.profile.steps import build
    from bigdit.profile.unwritten import unwritten_weights

    host = importlib.import_module("bigdit_emulated.host").tensor_bytes
    before, _ = host()
    with unwritten_weights():
        built = build(request, seed=0)
    return built, host()[0] - before


def _alike(request: StepRequest) -> str:
    """What requests have alike whose steps begin with the same model and encoders on the host."""
    strategy = request.strategy
    encoders = None if request.encoders is None else request.encoders.model_dump_json()
    lora = None if strategy.lora is None else strategy.lora.model_dump_json()
    dtype = strategy.precision.removesuffix("_sr")  # rounds stochastically what has the same dtype
    return f"{request.model.model_dump_json()} {encoders} {lora} {dtype}"


def _answer(line: str) -> str:
    from bigdit.profile.run_attempt import attempt, encode, leave_values

    question = Question.model_validate_json(line)
    if not question.values:
        leave_values()
    if question.request.part == "encoders":
        return encode(question).model_dump_json()
    built, host_bytes = _built[_alike(question.request)]
    if question.what == "recorded":
        from bigdit.profile.run_attempt import recorded

        return recorded(question.request, built, question.snapshot).model_dump_json()
    return attempt(question, built, host_bytes).model_dump_json()


def _import_all() -> None:
    """Import what all steps need. A real GPU would not survive a fork."""
    with libraries.importing(), libraries.models_alone():
        import torch

        import bigdit.profile.run_attempt  # noqa: F401

    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    torch.cuda.init()  # torch refuses to in a fork, since a real driver would
    torch.cuda._is_in_bad_fork = lambda: False  # there is no driver whose state a fork would break


def _import_for(request: StepRequest) -> None:
    """Import what the steps need beside that."""
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
            import torchao  # noqa: F401  # as peft does with the first adapter

            import bigdit.models.lora
        if request.encoders is not None:
            import bigdit.encoders.frozen  # noqa: F401


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
