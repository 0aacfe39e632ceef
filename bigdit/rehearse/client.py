"""Ask for rehearsals: from the cache, or from worker processes. Nothing here imports torch."""

from __future__ import annotations

import contextlib
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
from bigdit.spec import Strict

_LAST_LINES = 12


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
        self._said = Said()
        with undisturbed():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bigdit.rehearse"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said.file,
                env=worker_environment(),
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, request: RehearsalRequest, timeout_s: float) -> tuple[RehearsedSize, ...]:
        """The answers to `request`. Raises as `rehearse` does; the worker is of no use after that."""
        what = f"the rehearsal of {request.model.name}"
        try:
            answer = put(self._process, request, timeout_s)
        except TimeoutError:
            raise UserError(
                f"{what} took more than {timeout_s:g} s and was stopped; "
                f"ask for fewer micro-batch sizes at once, or give it more time"
            ) from None
        if not answer:
            raise failure(what, self._process.wait(), self._said.lines())
        sizes = Rehearsal.model_validate_json(answer).sizes
        if tuple(size.micro_batch_size for size in sizes) != request.micro_batch_sizes:
            raise RehearsalError(f"{what} answered another question")
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


class Said:
    """What a process writes to its stderr: a file without a name, of which nothing is left when both have ended."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 closed with the last that holds it

    def __len__(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def lines(self, since: int = 0) -> list[str]:
        """The lines from that byte on; where the process writes next stays as it is."""
        return os.pread(self.file.fileno(), len(self) - since, since).decode(errors="replace").splitlines()


def put(process: subprocess.Popen[bytes], question: Strict, timeout_s: float) -> bytes:
    """Put a question to a worker, a line of JSON: the line of its answer, empty where it has ended without a whole one.
    Raises TimeoutError."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and its status and last lines say why
        process.stdin.write(f"{question.model_dump_json()}\n".encode())
        process.stdin.flush()
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise TimeoutError
    line = process.stdout.readline()
    return line if line.endswith(b"\n") else b""


def failure(what: str, status: int | None, said: list[str]) -> Exception:
    """What `what`, which left no result, ended with: the errors that it said, or its last lines."""
    problems = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    if status == EXIT_USER and problems:
        return UserError(*problems)
    end = "\n".join(said[-_LAST_LINES:])
    return RehearsalError(f"{what} ended with status {status} and no result:\n{end}")


def worker_environment() -> dict[str, str]:
    """No real GPU, no network, and no place in a launched group: the worker is a process by itself."""
    own = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    paths = [str(Path(bigdit.__file__).parent.parent), own.get("PYTHONPATH", "")]
    return own | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
