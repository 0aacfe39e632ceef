"""Ask for a rehearsal: from the cache, or from a worker process. Nothing here imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import bigdit
from bigdit.catalog import FAMILIES
from bigdit.errors import EXIT_USER, UserError
from bigdit.rehearse import cache
from bigdit.rehearse.request import Rehearsal, RehearsalRequest, RehearsedSize

_LAST_LINES = 8


class RehearsalError(RuntimeError):
    """The worker ended without an answer; the message has its exit status and the end of its stderr."""


def rehearse(request: RehearsalRequest, *, timeout_s: float = 300.0) -> Rehearsal:
    """Rehearse two training steps at each micro-batch size; sizes asked before come from the cache.

    Raises UserError for what cannot be rehearsed or takes longer than `timeout_s`, and RehearsalError where
    the worker dies.
    """
    _check(request)
    kept = {size: cache.find(request, size) for size in request.micro_batch_sizes}
    known = {size: found for size, found in kept.items() if found is not None}
    missing = tuple(size for size in kept if size not in known)
    if missing:
        for found in _work(request.model_copy(update={"micro_batch_sizes": missing}), timeout_s):
            cache.keep(request, found)
            known[found.micro_batch_size] = found
    return Rehearsal(sizes=tuple(known[size] for size in request.micro_batch_sizes))


def _check(request: RehearsalRequest) -> None:
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


def _work(request: RehearsalRequest, timeout_s: float) -> tuple[RehearsedSize, ...]:
    with tempfile.TemporaryDirectory(prefix="bigdit-rehearsal-") as name:
        asked, answered, stderr = (Path(name) / file for file in ("request.json", "result.json", "stderr"))
        asked.write_text(request.model_dump_json())
        command = [sys.executable, "-m", "bigdit.rehearse.worker", str(asked), str(answered)]
        with open(stderr, "wb") as sink:
            try:
                status = subprocess.run(
                    command,
                    stdout=sink,
                    stderr=sink,
                    stdin=subprocess.DEVNULL,
                    env=worker_environment(),
                    timeout=timeout_s,
                ).returncode
            except subprocess.TimeoutExpired:
                raise UserError(
                    f"the rehearsal of {request.model.name} took more than {timeout_s:g} s and was stopped; "
                    f"ask for fewer micro-batch sizes at once, or give it more time"
                ) from None
        if status != 0 or not answered.exists():
            raise _failure(request, status, stderr.read_text(errors="replace").splitlines())
        return _read(answered, request)


def _read(answered: Path, request: RehearsalRequest) -> tuple[RehearsedSize, ...]:
    sizes = Rehearsal.model_validate_json(answered.read_bytes()).sizes
    if tuple(size.micro_batch_size for size in sizes) != request.micro_batch_sizes:
        raise RehearsalError(f"the rehearsal of {request.model.name} answered another question")
    return sizes


def _failure(request: RehearsalRequest, status: int, lines: list[str]) -> Exception:
    problems = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if status == EXIT_USER and problems:
        return UserError(*problems)
    end = "\n".join(lines[-_LAST_LINES:])
    return RehearsalError(f"the rehearsal of {request.model.name} ended with status {status} and no result:\n{end}")


def worker_environment() -> dict[str, str]:
    """No real GPU, no network, and no place in a launched group: the worker is a process by itself."""
    own = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    paths = [str(Path(bigdit.__file__).parent.parent), own.get("PYTHONPATH", "")]
    return own | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
