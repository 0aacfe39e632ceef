"""Less memory for the same samples a step: what to go on with, and the file that says it to every later start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from bigdit import log
from bigdit.cache import read_sealed, write_sealed
from bigdit.receipt import OutOfMemory
from bigdit.spec import StepSize, Strategy, Strict

FILE = "out_of_memory.json"


class Relief(Strict):
    """`asked`: the strategy as config or plan have it; `now`: what the run goes on with after these events."""

    asked: Strategy
    now: Strategy
    events: tuple[OutOfMemory, ...] = ()


def read_relief(output: Path, asked: Strategy) -> Relief:
    """What the run has come to in this output; a file for another strategy, or a damaged one, is said and left out."""
    path, none = output / FILE, Relief(asked=asked, now=asked)
    try:
        found = Relief.model_validate_json(read_sealed(path))
    except FileNotFoundError:
        return none
    except (OSError, ValidationError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        log.notice(f"note: {path} is not used ({why}): a step that runs out of memory again is made smaller again")
        return none
    if found.asked != asked:
        log.notice(f"note: {path} is of other settings than this run's, and is not used")
        return none
    log.notice(f"note: {said(found.now.step_size)}, since a step ran out of memory before ({path})")
    return found


def write_relief(output: Path, relief: Relief) -> None:
    """Let every later start go on so. Raises UserError where it cannot be written."""
    write_sealed(output / FILE, relief.model_dump_json(indent=1) + "\n")


def relieved(strategy: Strategy, planned: Sequence[StepSize], blocks: int) -> Strategy | None:
    """The strategy with less memory: the size that follows among the plan's, else half the micro-batch, else all of
    the model's `blocks` recomputed; None where there is nothing left to take."""
    size = strategy.step_size
    if size in planned[:-1]:
        return strategy.sized(planned[planned.index(size) + 1])
    samples = size.micro_batch_size * size.grad_accum_steps
    for micro_batch_size in range(size.micro_batch_size // 2, 0, -1):
        if samples % micro_batch_size == 0 and not strategy.optimizer_in_backward:
            update = {"micro_batch_size": micro_batch_size, "grad_accum_steps": samples // micro_batch_size}
            return strategy.sized(size.model_copy(update=update))
    whole = size.model_copy(update={"checkpointed_blocks": "all", "checkpointing": "full"})
    recomputes_all = size.checkpointed_blocks in ("all", blocks) and size.checkpointing == "full"
    return None if recomputes_all else strategy.sized(whole)


def said(size: StepSize) -> str:
    """The size by the config's keys."""
    kind = " (selective)" if size.checkpointing == "selective" else ""
    return (
        f"strategy.micro_batch_size {size.micro_batch_size}, grad_accum_steps {size.grad_accum_steps}, "
        f"checkpointed_blocks {size.checkpointed_blocks}{kind}"
    )
