"""Ask for rehearsals: from the cache, or from worker processes. Nothing here imports torch."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import bigdit
from bigdit.catalog import FAMILIES
from bigdit.errors import EXIT_USER, UserError
from bigdit.lifeline import undisturbed
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
    check(request)
    kept = {size: cache.find(request, size) for size in request.micro_batch_sizes}
    known = {size: found for size, found in kept.items() if found is not None}
    missing = tuple(size for size in kept if size not in known)
    if missing:
        with Worker() as worker:
            for found in worker.ask(request.model_copy(update={"micro_batch_sizes": missing}), timeout_s):
                cache.keep(request, found)
                known[found.micro_batch_size] = found
    return Rehearsal(sizes=tuple(known[size] for size in request.micro_batch_sizes))


class Worker:
    """One process that rehearses, one request after another; it starts at once, and ends with the `with` block."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bigdit-rehearsal-")
        self._stderr = Path(self._folder.name) / "stderr"
        try:
            with open(self._stderr, "wb") as sink, undisturbed():
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "bigdit.rehearse"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    env=worker_environment(),
                )
        except OSError:
            self._folder.cleanup()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def ask(self, request: RehearsalRequest, timeout_s: float) -> tuple[RehearsedSize, ...]:
        """The answers to `request`. Raises as `rehearse` does; the worker is of no use after that."""
        asked, answered = (Path(self._folder.name) / name for name in ("request.json", "result.json"))
        answered.unlink(missing_ok=True)
        asked.write_text(request.model_dump_json())
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{asked}\t{answered}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and its status and last lines say why
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise UserError(
                f"the rehearsal of {request.model.name} took more than {timeout_s:g} s and was stopped; "
                f"ask for fewer micro-batch sizes at once, or give it more time"
            )
        if not self._process.stdout.readline() or not answered.exists():
            lines = self._stderr.read_text(errors="replace").splitlines()
            raise _failure(request, self._process.wait(), lines)
        sizes = Rehearsal.model_validate_json(answered.read_bytes()).sizes
        if tuple(size.micro_batch_size for size in sizes) != request.micro_batch_sizes:
            raise RehearsalError(f"the rehearsal of {request.model.name} answered another question")
        return sizes


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
