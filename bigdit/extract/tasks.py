"""Extraction by tasks on other machines: SLURM arrays by submitit, and Ray. All tasks have the same job.

Each task pulls missing ranges, so fast tasks do more. If a task is lost, other tasks or a second run do its work.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bigdit import log
from bigdit.errors import UserError, nearest
from bigdit.extract.extract import Job, encode_here
from bigdit.sources.open import open_source
from bigdit.store.changes import Items, numbered
from bigdit.store.schema import EXTRACT, check_same
from bigdit.units import how_many

LOGS = "slurm"
_INTERVAL_S = 0.5  # the shortest time between two listings of the store
_TIMEOUT_MIN = 24 * 60  # the default of a task; submitit's is 5 minutes
# Options of a Ray task that users may set. Source: ray 2.60, ray.remote_function.RemoteFunction.options.
_RAY_OPTIONS = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "scheduling_strategy")


def do(job: Job) -> None:
    """Run a job as a task of an engine: open the sources, and encode.

    Raises UserError if the sources differ from the job's, and as encode_here.
    """
    try:
        os.chdir(job.folder)
    except OSError as error:
        raise UserError(f"{job.folder} cannot be entered on this machine: {error.strerror}") from None
    source = open_source(job.data)
    check_same(job.data.store, job.schema.requested(), job.schema.requested(source.identity["sources"]))
    encode_here(job, numbered(job.data.store, job.schema, source))


class _Task:
    """A job for submitit. If SLURM preempts it or its time ends, it is queued again and resumes."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self) -> None:
        do(self._job)

    def checkpoint(self) -> Any:
        """The task that submitit queues instead of an interrupted one. It finds the missing ranges itself."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class Slurm:
    """An array of `tasks`. `resources`: submitit's parameters, such as slurm_partition, timeout_min, gpus_per_node.

    Its `cluster` is slurm, or local, which runs the tasks as processes of this machine.
    """

    tasks: int
    resources: Mapping[str, Any]

    def __call__(self, job: Job, source: Items) -> None:
        try:
            import submitit
        except ImportError:
            raise UserError("--engine slurm: submitit is missing; pip install 'bigdit[slurm]'") from None
        parameters: dict[str, Any] = {"timeout_min": _TIMEOUT_MIN, "cpus_per_task": job.workers, **self.resources}
        cluster = parameters.pop("cluster", "slurm")
        if cluster not in ("slurm", "local"):
            raise UserError(f"--resource: cluster={cluster} is neither slurm nor local")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise UserError("--engine slurm: sbatch was not found on this machine; run this on a SLURM login node")
        executor = submitit.AutoExecutor(folder=job.data.store / LOGS, cluster=cluster)
        try:
            executor.update_parameters(name="bigdit-extract", **parameters)
        except (NameError, TypeError, ValueError) as error:
            raise UserError(f"--resource: submitit rejects it: {' '.join(str(error).split())}") from None
        jobs = executor.submit_array([_Task(job)] * self.tasks)
        log.notice(f"submitted {', '.join(each.job_id for each in jobs)}; logs: {job.data.store / LOGS}")
        try:
            _watch(job, lambda: all(each.done() for each in jobs))
        except KeyboardInterrupt:
            log.notice("the tasks continue without this command; `scancel` ends them")
            raise
        failed = [each for each in jobs if each.exception() is not None]
        if failed and job.left():
            raise _failed(len(failed), self.tasks, str(failed[0].exception()), f"log: {failed[0].paths.stderr}")


@dataclass(frozen=True)
class Ray:
    """`tasks` on the Ray cluster of RAY_ADDRESS, or on one started here. `resources`: options of ray.remote, such as
    num_gpus."""

    tasks: int
    resources: Mapping[str, Any]

    def __call__(self, job: Job, source: Items) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("--engine ray: ray is missing; pip install 'bigdit[ray]'") from None
        if wrong := [name for name in self.resources if name not in _RAY_OPTIONS]:
            raise UserError(f"--resource: a Ray task has no option {wrong[0]}; {nearest(wrong[0], _RAY_OPTIONS)}")
        began_here = not ray.is_initialized()
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        try:
            options = {"num_cpus": job.workers, "scheduling_strategy": "SPREAD", "max_retries": 3, **self.resources}
            task = ray.remote(do).options(**options)
            waiting = [task.remote(job) for _ in range(self.tasks)]
            _watch(job, lambda: len(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]) == len(waiting))
            try:
                ray.get(waiting)
            except ray.exceptions.RayError as error:
                if job.left():
                    raise _failed(1, self.tasks, str(error), "the dashboard of Ray has its log") from None
        finally:
            if began_here:
                ray.shutdown()


def _failed(count: int, tasks: int, error: str, where: str) -> UserError:
    """The error for failed tasks, with the last line of the traceback in `error`."""
    reasons = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt): .*", error, re.MULTILINE)
    reason = reasons[-1].removeprefix("bigdit.errors.UserError: ") if reasons else " ".join(error.split())[:300]
    resumes = f"{EXTRACT} resumes from the finished parts"
    return UserError(f"{count} of {how_many(tasks, 'task')} failed, the first: {reason}; {where}; {resumes}")


def _watch(job: Job, over: Callable[[], bool]) -> None:
    """Show a progress bar of the store until the tasks are over."""
    left, ended = _images(job), False
    with log.progress("extract", total=left, unit=job.data.samples) as advance:
        while not ended:
            began = time.perf_counter()
            ended = over()
            before, left = left, _images(job)
            advance(before - left)
            if not ended:
                time.sleep(max(_INTERVAL_S, 20 * (time.perf_counter() - began)))  # to list many files takes long


def _images(job: Job) -> int:
    return sum(end - start for start, end in job.left())
