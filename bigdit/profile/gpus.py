"""Runs jobs on a few emulated GPUs in parallel, in processes with the CUDA build of torch. No torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

from bigdit.cache import VARIABLE, Cache, digest_of, installed
from bigdit.catalog import CatalogModel, Gpu
from bigdit.catalog.resolve import config_file
from bigdit.config.strategy_text import LARGEST_MICRO_BATCH
from bigdit.emulator import emulated_environment
from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.errors import UserError
from bigdit.machine import memory_bytes
from bigdit.processes import ROOT, in_checkout, own_module
from bigdit.profile.attempt import UNLIMITED, Attempt, AttemptJob, Profile, StepRequest, TookTooLong, check
from bigdit.profile.pool import Pool, WorkerEnded, WorkerError, environment
from bigdit.strategy import OptimizerSpec
from bigdit.units import GIB

T = TypeVar("T")

MOST_WORKERS = 4
WORKER_BYTES = 2 * GIB
"""CPU memory of this machine for each worker beyond two: three times what one needs (benchmarks/README.md)."""

_ATTEMPTS = Cache("attempts", Attempt, "the attempt", "the step is run")
_PROFILES = Cache("profiles", Profile, "the profile", "the step is recorded")

SOURCES = (
    *("strategy", "emulator", "engines", "encoders", "loader", "memory", "models", "objectives", "objective_spec.py"),
    *("optim", "profile", "record", "train/step.py"),
)
"""A cached answer is valid for these sources."""


@dataclass(frozen=True)
class Row:
    """Two steps by micro-batch size. `guess`: about how many samples fit. `sample_bytes`: about the bytes of one more;
    0 if unknown. `known`: reserved bytes at sizes that ran without a memory limit. `failing`: a size that does not fit.
    """

    request: Callable[[int], StepRequest]
    guess: float
    sample_bytes: float = 0
    known: Mapping[int, int] = field(default_factory=dict)
    failing: int = LARGEST_MICRO_BATCH + 1

    def expected(self, reserved: Mapping[int, int], capacity_bytes: int) -> float:
        """About how many samples fit: between the largest known size that fits and the smallest that does not.

        Without both, from the size whose bytes are nearest to the capacity, and the next that differs by a sixteenth.
        """
        near = sorted(reserved, key=lambda size: abs(reserved[size] - capacity_bytes))
        if not near:
            return self.guess
        fitting, over = (
            [size for size in near if (reserved[size] <= capacity_bytes) == fits] for fits in (True, False)
        )
        first, sample = near[0], self.sample_bytes or reserved[near[0]] / max(near[0], 1)
        other = next((size for size in near[1:] if abs(size - first) * 16 >= first), first)
        if fitting and over:
            first, other = max(fitting), min(over)
        if (grown := (reserved[first] - reserved[other]) / ((first - other) or 1)) > 0:
            sample = grown
        return first + (capacity_bytes - reserved[first]) / max(sample, 1.0)


_COMPILED_TIMES = 6
"""How many times as long steps with compiled blocks may take: the compiler needs minutes on a busy machine."""


class EmulatedGpus:
    """`count` emulated GPUs of one kind, in parallel; two, or one for each core and WORKER_BYTES, up to MOST_WORKERS.

    Each job runs in a fork of one process. `done` is called with the number of answers so far. `unanswered` has a line
    for each reason why a job has no answer. Raises UserError without a CUDA build of torch.
    """

    def __init__(
        self, gpu: Gpu, count: int | None = None, *, timeout_s: float = 300.0, expandable_segments: bool = True
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        self.gpu, self.count = gpu, count or max(2, min(cores, memory_bytes() // WORKER_BYTES, MOST_WORKERS))
        self.build = cuda_build(cuda_python())
        self.unanswered: dict[str, None] = {}
        self._settings = f"{self.build}, expandable segments {expandable_segments}, {installed()}"
        self.done: Callable[[int], None] = lambda answers: None
        self.knows_code = False  # whether the compiled code of all jobs is kept, as far as is known
        self._timeout_s, self._answers = timeout_s, 0
        self._reads: dict[str, bool] = {}  # by kind: whether the forward pass reads values, which memory depends on
        self._refused: dict[tuple[str, ...], UserError] = {}  # a failed compilation would take as long again
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(self.count):
            self._free.put(slot)
        self._threads = ThreadPoolExecutor(self.count)
        self._lock = Lock()
        self._pool = Pool(partial(_worker, gpu, expandable_segments), self.count)

    def __enter__(self) -> EmulatedGpus:
        self._threads.submit(self._pool.start)  # so that libraries are imported before the first job
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    def profile(self, request: StepRequest, snapshot: Path | None = None) -> Profile:
        """Two recorded steps, from the cache if possible; a `snapshot` file of torch's memory is always a new run.

        Raises UserError for errors that the user can fix, TookTooLong, and WorkerError if the process dies.
        """
        job = AttemptJob(what="recorded", request=request)
        key = self._key(job)
        with self._free_slot() as slot:
            found = None if snapshot else _PROFILES.find(key)
            if found is None:
                values = self._reads.get(_kind(request), not request.strategy.compile_blocks)
                asked = job.model_copy(update={"values": values, "snapshot": snapshot and str(snapshot.absolute())})
                found = Profile.model_validate_json(self._ask(asked, slot))
                _PROFILES.keep(key, found)
            return found

    def attempt(self, request: StepRequest, capacity_bytes: int = UNLIMITED, **how: Any) -> Attempt:
        """Two steps in which torch may reserve so many bytes, from the cache if possible. `how`: fields of AttemptJob.

        Raises as `profile`.
        """
        return self._attempt(AttemptJob(request=request, capacity_bytes=capacity_bytes, **how))

    def _attempt(self, job: AttemptJob) -> Attempt:
        key = self._key(job)
        with self._free_slot() as slot:
            found = _ATTEMPTS.find(key)
            for more in {"nothing": ("update", "step"), "update": ("step",), "step": ()}[job.counted]:
                found = found or _ATTEMPTS.find(self._key(job.model_copy(update={"counted": more})))
            if found is None:
                if key in self._refused:
                    raise self._refused[key]
                try:
                    found = self._run_with_needed_values(job, slot)
                except UserError as error:
                    if not isinstance(error, TookTooLong):
                        self._refused[key] = error
                    raise
                _ATTEMPTS.keep(key, found)
                if job.capacity_bytes < UNLIMITED and found.fits:  # the limit was never met
                    free = {"capacity_bytes": UNLIMITED, "to_end": True}
                    _ATTEMPTS.keep(self._key(job.model_copy(update=free)), found)
            if found.out_of_memory is not None and job.capacity_bytes == UNLIMITED:
                raise UserError(f"{job.request.model.name} fits no GPU: {found.out_of_memory.partition('. GPU')[0]}")
            strategy = job.request.strategy
            if (found.ran or found.reads) and not (strategy.compile_blocks or strategy.offload_activations):
                self._reads.setdefault(_kind(job.request), found.reads > 0)
            return found

    def attempts(self, jobs: Sequence[AttemptJob]) -> list[Attempt | Exception]:
        """An attempt for each job, in parallel; or its UserError or WorkerError. Raises UserError about the cache.

        Equal jobs run once. Failures that may be due to this machine (a timeout, a process that died) are lines in
        `unanswered` too.
        """
        keys = [job.model_dump_json() for job in jobs]
        once = dict(zip(keys, jobs, strict=True))
        found = {key: self._threads.submit(self._answered, job) for key, job in once.items()}
        return [found[key].result() for key in keys]

    def apart(self, run: Callable[..., T], *items: Sequence[Any]) -> list[T]:
        """The results of calls that run at once, each in a thread of its own. Ctrl-C ends all jobs."""
        with ThreadPoolExecutor(max(len(items[0]), 1)) as threads:
            try:
                return [*threads.map(run, *items)]
            except KeyboardInterrupt:
                self._pool.close()  # else the threads, and so Ctrl-C, would wait for their answers
                raise

    def largest(self, row: Row, capacity_bytes: int) -> tuple[float, dict[int, int]] | None:
        """The largest micro-batch that fits, plus about the fraction of the next sample that fits (below 1: none fits);
        and reserved bytes at the sizes that ran. None if an attempt failed.

        Sizes run without a limit, to learn their bytes. One that should not fit runs with the limit, and ends early,
        unless its bytes are cached, or blocks are compiled, whose new code is cached only after the backward pass.
        """
        reserved = dict(row.known)
        fitting = max((size for size, nbytes in reserved.items() if nbytes <= capacity_bytes), default=0)
        failing = min([row.failing, *(size for size, nbytes in reserved.items() if nbytes > capacity_bytes)])
        while fitting + 1 < failing:
            expected = row.expected(reserved, capacity_bytes)
            size = min(max(round(expected), fitting + 1), failing - 1)
            request = row.request(size)
            job = AttemptJob(request=request)
            hopeless = size > expected and (self.knows_code or not request.strategy.compile_blocks)
            if hopeless and _ATTEMPTS.find(self._key(job)) is None:
                job = AttemptJob(request=request, capacity_bytes=capacity_bytes, to_end=False)
            attempt = self._answered(job)
            if not isinstance(attempt, Attempt):
                return None
            if attempt.ran:
                reserved[size] = attempt.peak_reserved_bytes
            fits = attempt.fits and attempt.peak_reserved_bytes <= capacity_bytes
            fitting, failing = (size, failing) if fits else (fitting, size)
        return fitting + min(max(row.expected(reserved, capacity_bytes) - fitting, 0.0), 0.99), reserved

    def _answered(self, job: AttemptJob) -> Attempt | Exception:
        try:
            return self._attempt(job)
        except (UserError, WorkerError) as error:
            if any(name in str(error) for name in (VARIABLE, "TORCHINDUCTOR_CACHE_DIR")):  # all steps have it
                raise
            if isinstance(error, TookTooLong | WorkerError):
                self.unanswered[str(error).splitlines()[0].rstrip(":")] = None
            return error

    @contextmanager
    def _free_slot(self) -> Iterator[int]:
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)
            with self._lock:
                self._answers += 1
                self.done(self._answers)

    def _run_with_needed_values(self, job: AttemptJob, slot: int) -> Attempt:
        """Run without values, which is faster; with them if the forward pass reads any."""
        kind, strategy = _kind(job.request), job.request.strategy
        if not self._reads.get(kind):
            # Compiled kernels compute no values anyway, and offloaded activations are copied, not read.
            copied = strategy.compile_blocks or (strategy.offload_activations and kind in self._reads)
            with suppress(UserError, WorkerError):  # of a step that read a value
                without = self._run(job, slot, values=False)
                if copied or not without.reads:
                    return without
            self._reads[kind] = True
        return self._run(job, slot, values=True).model_copy(update={"reads": 1})  # it read values of tensors on the CPU

    def _run(self, job: AttemptJob, slot: int, *, values: bool) -> Attempt:
        return Attempt.model_validate_json(self._ask(job.model_copy(update={"values": values}), slot))

    def _key(self, job: AttemptJob) -> tuple[str, ...]:
        return self.gpu.model_dump_json(), job.model_dump_json(), self._settings, digest_of(*SOURCES)

    def _ask(self, job: AttemptJob, slot: int) -> bytes:
        check(job.request)
        name = job.request.model.name
        limit_s = self._timeout_s * (_COMPILED_TIMES if job.request.strategy.compile_blocks else 1)
        try:
            return self._pool.ask(slot, f"{name} on an emulated GPU", job, limit_s)
        except TimeoutError:
            raise TookTooLong(
                f"two steps of {name} on an emulated {self.gpu.name} took more than {limit_s:g} s"
            ) from None


def of_config(model: CatalogModel, errors: Iterable[Exception]) -> Exception:
    """The error for a model that cannot step. That of a user's own config.json names it: its arguments are at fault."""
    first, *_ = errors = [*errors]
    if model.params is not None or not model.source:
        return first
    problems: list[str] = []
    for error in errors:
        if isinstance(error, WorkerEnded):  # not the user's error
            return error
        if isinstance(error, WorkerError):
            problems.append(f"its arguments do not fit together: {error.why.removeprefix('RuntimeError: ')}")
        else:
            problems += (re.sub(r"^model\.kwargs(\.|: )", "", line) for line in str(error).splitlines()[:1])
    file = config_file(Path(model.source[0]))
    return UserError(*dict.fromkeys(f"--model: {file}: {problem}" for problem in problems))


def _kind(request: StepRequest) -> str:
    """A key that is equal for attempts that differ only in sizes, or in settings (not fp16) that change no values."""
    settled = request.strategy.settled(micro_batch_size=1, grad_accum_steps=1, checkpointed_blocks=0)
    alike = {"optimizer": OptimizerSpec(), "checkpointing": "full", "blocks_to_swap": 0, "offload_activations": False}
    alike["precision"] = settled.precision.removesuffix("_sr")
    batch = request.batch.model_copy(update={"latents": (1, 1, 1)})
    return request.model_copy(update={"strategy": settled.model_copy(update=alike), "batch": batch}).model_dump_json()


def _worker(gpu: Gpu, expandable_segments: bool) -> tuple[list[str], dict[str, str]]:
    command = [str(cuda_python()), "-W", "ignore", *own_module("bigdit.profile")]
    return command, worker_environment(gpu, expandable_segments=expandable_segments)


def worker_environment(gpu: Gpu, *, expandable_segments: bool = True) -> dict[str, str]:
    """The environment of one process on this GPU. It needs no peers, also as one of several ranks."""
    found = environment(expandable_segments=expandable_segments) | emulated_environment(gpu, peers=False)
    found["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # Inductor runs in forks, which have no other threads
    for name in ("CUDA_VISIBLE_DEVICES", "BIGDIT_EMULATED_OUT"):  # attempts do not belong to an emulated command
        found.pop(name, None)
    # Where pip installed bigdit, its folder also has a torch, which must not precede the CUDA build.
    return found | {"PYTHONPATH": os.pathsep.join([*([str(ROOT)] if in_checkout() else []), found["PYTHONPATH"]])}
