"""The server of emulated GPUs: `python -m bigdit.profile SLOT…` (gpus.py starts it, pool.py serves).

Each model is built once, in a branch of this process. Each job runs in a fork of a branch, which starts with that model
and an empty GPU.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from bigdit import libraries
from bigdit.catalog.families import FAMILIES
from bigdit.errors import guard
from bigdit.processes import end_with
from bigdit.profile.attempt import AttemptJob, StepRequest
from bigdit.profile.pool import Service, serve

if TYPE_CHECKING:
    from bigdit.profile.steps import Built

_built: list[tuple[Built, int]] = []
"""The model of this branch, and its bytes of CPU memory."""


def main(given: list[str]) -> None:
    """Answer jobs until all slots are closed."""
    end_with(os.getppid(), signal.SIGKILL)
    _import_all()
    serve(given, Service(prepare=_import_for, alike=_alike, build=_build, answer=_answer))


def _request(line: str) -> StepRequest:
    return AttemptJob.model_validate_json(line).request


def _alike(line: str) -> str:
    """A key that is equal for jobs whose steps start with the same model and encoders in CPU memory."""
    request = _request(line)
    if request.part == "encoders":
        return request.part
    strategy = request.strategy
    encoders, added = request.encoders, strategy.lora or strategy.controlnet
    dtype = strategy.precision.removesuffix("_sr")  # stochastic rounding has the same dtype
    compiled = "compiled" if strategy.compile_blocks else ""  # the compiler is imported before a branch
    return f"{request.model!r} {encoders!r} {added!r} {dtype} {compiled}"


def _build(line: str) -> None:
    """Build the job's model and encoders, unless this branch has them."""
    from bigdit.profile.steps import build
    from bigdit.profile.unwritten import unwritten_weights

    request = _request(line)
    if _built or request.part == "encoders":
        return
    host = importlib.import_module("bigdit_emulated.host").tensor_bytes
    before, _ = host()
    with unwritten_weights():
        built = build(request, seed=0)
    _built.append((built, host()[0] - before))


def _answer(line: str) -> str:
    from bigdit.models.equip import compile_errors
    from bigdit.profile.run_attempt import attempt, encode, recorded

    job = AttemptJob.model_validate_json(line)
    if not job.values:
        importlib.import_module("bigdit_emulated.values").leave()
    strategy = job.request.strategy
    if strategy.compile_blocks and strategy.float8 != "none":
        from bigdit.models.float8 import keep_float8

        keep_float8()
    if job.request.part == "encoders":
        return encode(job).model_dump_json()
    ((built, host_bytes),) = _built
    with compile_errors(), _traces(job):
        if job.what == "recorded":
            return recorded(job.request, built, job.snapshot).model_dump_json()
        return attempt(job, built, host_bytes).model_dump_json()


def _traces(job: AttemptJob) -> AbstractContextManager[None]:
    """The traces of compiled blocks.

    A run with values has none: it follows one that failed. Nor has a recorded run, which tells blocks of memory apart
    by what Dynamo traces; nor FSDP2, whose classes of blocks are new in each process.
    """
    strategy = job.request.strategy
    if job.values or job.what == "recorded" or not strategy.compile_blocks or strategy.engine == "fsdp2":
        return nullcontext()
    from bigdit.models.traces import kept_traces

    return kept_traces(strategy, f"{job.request.model!r} {job.request.batch!r} {job.request.encoders!r}")


def _import_all() -> None:
    """Import what all steps need, and initialise CUDA before forks, which only emulated GPUs allow."""
    with libraries.importing(), libraries.models_alone():
        import torch

        import bigdit.profile.run_attempt  # noqa: F401

    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    torch.cuda.init()  # torch refuses to in a fork, since a real driver would
    torch.cuda._is_in_bad_fork = lambda: False  # no driver has state that a fork would break
    torch.cuda.get_device_properties(0)  # torch keeps them; without a limit more memory would be reported


def _import_for(line: str) -> None:
    """Import what else the job's steps need."""
    request = _request(line)
    with libraries.importing(), libraries.uncompiled():
        import diffusers
        import torch

        from bigdit import optim

        getattr(diffusers, request.model.class_name, None)
        strategy = request.strategy
        # To build an optimizer imports its library.
        optim.build(strategy.optimizer, [torch.zeros(1)], stochastic_rounding=strategy.precision == "bf16_sr")
        importlib.import_module(f"bigdit.engines.{strategy.engine}")
        if strategy.controlnet is not None:
            getattr(diffusers, FAMILIES[request.model.class_name].controlnet or "")
        if request.encoders is not None:
            import bigdit.encoders.frozen  # and transformers, before peft
        if strategy.lora is not None or strategy.packed:
            with libraries.without_transformers():
                import bigdit.models.lora  # noqa: F401
        if strategy.float8 != "none":
            import torchao.float8  # noqa: F401
    if strategy.compile_blocks:
        from bigdit.models.equip import compile_errors
        from bigdit.profile.compiled import without_machine_code

        with libraries.importing(), compile_errors():
            without_machine_code()


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
