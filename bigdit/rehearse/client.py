"""Ask for rehearsals: from the cache, or from worker processes. Nothing here imports torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import bigdit
from bigdit.catalog import FAMILIES
from bigdit.checkout import own_module
from bigdit.errors import UserError
from bigdit.rehearse import cache
from bigdit.rehearse.lanes import Lanes, RehearsalError
from bigdit.rehearse.request import Rehearsal, RehearsalRequest, RehearsedSize


class TookTooLong(UserError):
    """A rehearsal was stopped: on another day, or another machine, it may have an answer."""


def rehearse(request: RehearsalRequest, *, timeout_s: float = 300.0) -> Rehearsal:
    """Rehearse two training steps at each micro-batch size; sizes asked before come from the cache.

    Raises UserError for what cannot be rehearsed or takes longer than `timeout_s`, and RehearsalError where
    the worker dies.
    """
    check(request)
    kept = {size: cache.find(request, size) for size in request.micro_batch_sizes}
    known = {size: found for size, found in kept.items() if found is not None}
    missing = tuple(size for size in kept if size not in known)
    if missing:
        with Lanes(worker) as lanes:
            for found in ask(lanes, 0, request.model_copy(update={"micro_batch_sizes": missing}), timeout_s):
                cache.keep(request, found)
                known[found.micro_batch_size] = found
    return Rehearsal(sizes=tuple(known[size] for size in request.micro_batch_sizes))


def ask(lanes: Lanes, lane: int, request: RehearsalRequest, timeout_s: float) -> tuple[RehearsedSize, ...]:
    """The answers of one of the `lanes` to `request`. Raises as `rehearse` does."""
    what = f"the rehearsal of {request.model.name}"
    try:
        answer = lanes.ask(lane, what, request, timeout_s)
    except TimeoutError:
        raise TookTooLong(
            f"{what} took more than {timeout_s:g} s and was stopped; "
            f"ask for fewer micro-batch sizes at once, or give it more time"
        ) from None
    sizes = Rehearsal.model_validate_json(answer).sizes
    if tuple(size.micro_batch_size for size in sizes) != request.micro_batch_sizes:
        raise RehearsalError(f"{what} answered another question")
    return sizes


def worker() -> tuple[list[str], dict[str, str]]:
    """The process that rehearses, as Lanes start it."""
    return [sys.executable, *own_module("bigdit.rehearse")], worker_environment()


def check(request: RehearsalRequest) -> None:
    """Raise UserError for a request that no worker could answer."""
    inputs = FAMILIES.get(request.model.class_name)
    if inputs is not None and inputs.text_dim is not None and request.batch.text is None:
        raise UserError(f"a rehearsal of {request.model.name} needs the shape of the model's text, (tokens, dim)")
    online = request.strategy.features == "online"
    if online and request.encoders is None:
        raise UserError(
            f"strategy.features is online, and the rehearsal of {request.model.name} was given no encoders; "
            "catalog.encoders.online_encoders has those of the catalogue's models"
        )
    if not online and request.encoders is not None:
        raise UserError("encoders were given, and strategy.features is cached, which needs none; set it to online")


def worker_environment() -> dict[str, str]:
    """No real GPU, no network, and no place in a launched group: the worker is a process by itself."""
    own = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    paths = [str(Path(bigdit.__file__).parent.parent), own.get("PYTHONPATH", "")]
    return own | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
