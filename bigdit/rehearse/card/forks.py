"""Processes that begin with all libraries imported: forks of one that imported them, and has nothing on its card.

For emulated cards alone: a real one does not survive a fork.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable

from bigdit import libraries
from bigdit.errors import guard
from bigdit.lifeline import end_with
from bigdit.rehearse.request import RehearsalRequest


def import_for(request: RehearsalRequest) -> None:
    """Import what the request's steps need, once for all forks that follow."""
    libraries.prepare()
    gc.disable()  # what is imported stays, and collections would look through all of it time and again
    import torch

    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    import bigdit.rehearse.card.steps
    from bigdit import optim

    strategy = request.strategy
    # Of one number: it imports the library that has the optimizer.
    optim.build(strategy.optimizer, [torch.zeros(1)], stochastic_rounding=strategy.precision == "bf16_sr")
    if strategy.engine == "deepspeed":
        import bigdit.engines.deepspeed
    if strategy.engine == "fsdp2":
        import bigdit.engines.fsdp2
    if strategy.lora is not None:
        import bigdit.models.lora
    if strategy.features == "online":
        import bigdit.encoders.frozen  # noqa: F401
    torch.cuda.init()  # torch refuses to in a fork, since a real driver would
    gc.freeze()
    gc.enable()


def fork(work: Callable[[], None]) -> int:
    """A process that does this work, and ends with the status of a command: its id."""
    child = os.fork()
    if child:
        return child
    status = 3
    try:
        end_with(os.getppid(), signal.SIGKILL)
        import torch

        torch.cuda._is_in_bad_fork = lambda: False  # there is no driver whose state a fork would break
        status = guard(work)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit


def ended(child: int) -> int:
    """Wait until it has ended; its exit status, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
