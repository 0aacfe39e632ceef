"""What a process has while it trains: its device, its process group, and the lock of the output."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bigdit import libraries, log
from bigdit.dist import World, asked_of_accelerate, processes_here
from bigdit.documents import parse_json
from bigdit.errors import UserError, refused
from bigdit.files import WITHOUT_LOCKS
from bigdit.train.processes.end import STARTS

_LOG_AFTER_S = 10.0
"""A process that waits longer for the others logs that."""
_MORE_THAN_TORCH_S = 5.0
"""Seconds added to torch's own timeout."""


def _gpu(world: World) -> torch.device:
    """This process's GPU: that of its local rank."""
    processes, gpus = processes_here() or world.local_rank + 1, torch.cuda.device_count()
    if processes > gpus:
        raise UserError(
            f"{processes} processes of the run are on this machine, a GPU each, and torch sees {gpus} there: start "
            f"{gpus} (strategy.world_size, or the launcher's own number), or make more visible (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", world.local_rank)


@contextmanager
def process_group(
    world: World, *, needed: bool, on_host: bool = False, timeout: float = 600.0, meeting: float = 240.0
) -> Iterator[torch.device]:
    """The device of this process, inside a process group if one is `needed` or several processes run.

    `on_host`: CPU tensors are reduced too (FSDP2 with CPU offload). `timeout`: seconds that a process waits for
    another, in every group made inside; `meeting`: seconds until all must have connected. Raises UserError if they do
    not, if this machine has fewer GPUs than processes, and if accelerate was asked for the CPU.
    """
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        if "cpu" in asked_of_accelerate():
            raise UserError(
                "accelerate was asked for --cpu (ACCELERATE_USE_CPU), and runs take the GPUs that they see; leave it "
                "out, or hide the GPUs: CUDA_VISIBLE_DEVICES="
            )
        device = _gpu(world)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if on_host else "nccl"
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed guesses one, and warns
    # Processes share the machine's cores. torchrun gives each process one: too few for an optimizer on the CPU.
    if world.world_size > 1 or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (processes_here() or world.world_size)))
    libraries.prepare()
    if not needed and world.world_size == 1:
        yield device
        return
    with _group_timeout(timedelta(seconds=timeout)):
        if world.world_size == 1:  # DeepSpeed and FSDP2 need a group even for one process, and DeepSpeed this variable
            os.environ.setdefault("LOCAL_RANK", "0")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            with _log_waiting(f"within {meeting:g} s (train.timeout)"):
                _meet(backend, timeout, meeting)
        try:
            yield device
        finally:
            dist.destroy_process_group()  # else ZeRO-3's threads still run at exit, and abort the process


@contextmanager
def _group_timeout(timeout: timedelta) -> Iterator[None]:
    """Set torch's default timeout of process groups, which DeepSpeed and device meshes use.

    Source: _get_default_timeout in torch/distributed/distributed_c10d.py, torch 2.13.
    """
    c10d = dist.distributed_c10d
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    try:
        yield
    finally:
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


@contextmanager
def _log_waiting(limit: str) -> Iterator[None]:
    """Log on the first process of a machine that it waits, if connecting takes long."""
    address, port, size = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    line = f"waiting until all {size} processes of the run connect to {address}:{port}, {limit}"
    timer = threading.Timer(_LOG_AFTER_S, log.notice, [line])
    timer.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _wait_for_port(address: tuple[str, int], seconds: float) -> None:
    """Wait until the first process listens. Raises OSError otherwise: torch would print its own stack."""
    ends = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(address, max(ends - time.monotonic(), 1.0)).close()
        except OSError:
            if time.monotonic() > ends:
                raise
        time.sleep(0.2)


def _rendezvous(seconds: float) -> tuple[dist.Store, int, int]:
    """The store of all processes, the rank of this one, and their number.

    Raises TimeoutError if another program listens at the address: torch would wait for its answer forever.
    """
    found: Future[tuple[dist.Store, int, int]] = Future()

    def ask() -> None:
        try:
            found.set_result(next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds))))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return found.result(seconds + _MORE_THAN_TORCH_S)


def _meet(backend: str, timeout: float, meeting: float) -> None:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    where = f"{address}:{port} (--head, or MASTER_ADDR and MASTER_PORT)"
    another = f"another program uses the port of {where}; set another"
    absent = f"not all processes of the run connected to {where} within train.timeout, {meeting:g} s, or one ended"
    try:
        if os.environ.get("RANK", "0") != "0" and address and port.isdigit():
            _wait_for_port((address, int(port)), meeting)
    except OSError as error:
        raise UserError(f"{absent}: {error}") from error
    try:
        store, rank, size = _rendezvous(meeting)
        store.set_timeout(timedelta(seconds=timeout))
        store = dist.PrefixStore(f"start {os.environ.get(STARTS, '0')}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    except TimeoutError as error:
        raise UserError(another) from error
    except RuntimeError as error:  # errors of the network and of torch's store
        if refused(error):
            raise
        why = (str(error).splitlines() or [""])[0][:200]
        if "EADDRINUSE" in str(error):
            raise UserError(another) from error
        raise UserError(f"{absent}: {why}") from error


FILE = "lock"
PATIENCE_S = 5.0  # a killed process keeps its lock until the kernel has freed its memory


@contextmanager
def output_lock(output: Path, world: World) -> Iterator[None]:
    """Lock the output for this group of processes. Raises UserError on all of them if another group has the lock.

    The main process holds flock(2) on `OUTPUT/lock`, which ends with the process. Other machines see the lock on NFS 4,
    NFS 3 with lockd and Lustre mounted with flock; not on NFS mounted with nolock or local_lock, or Lustre with
    localflock.
    """
    descriptor, problem = None, None
    if world.is_main:
        try:
            descriptor = _take(output)
        except UserError as error:
            problem = str(error)
    if world.world_size > 1:
        shared = [problem]
        dist.broadcast_object_list(shared)
        dist.barrier()  # the main process may hold the store of this broadcast, and must not end before the others
        problem = shared[0]
    if problem is not None:
        raise UserError(problem)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _take(output: Path) -> int:
    """The descriptor of the locked file. Raises UserError if another process has the lock, or it cannot be written."""
    path = output / FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another output") from error
    try:
        if not _locked(descriptor):
            raise UserError(
                f"output {output} is in use by {_holder(descriptor)}; wait for it, end it, or choose another output"
            )
        _sign(descriptor)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in WITHOUT_LOCKS:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another output") from error
        log.notice(f"note: {path} cannot be locked ({error.strerror}): a second trainer there would not be noticed")
        return os.open(os.devnull, os.O_RDONLY)
    except UserError:
        os.close(descriptor)
        raise
    return descriptor


def _locked(descriptor: int) -> bool:
    """Whether the lock was acquired within the patience."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


def _sign(descriptor: int) -> None:
    """Write into the file who holds the lock."""
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(sys.orig_argv),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)


def _holder(descriptor: int) -> str:
    """Who holds the lock, for people. A new holder may not have signed yet."""
    with suppress(ValueError, KeyError, TypeError):
        found = parse_json(os.pread(descriptor, 1 << 16, 0))
        command = str(found["command"])
        shown = command if len(command) <= 160 else command[:80] + " … " + command[-80:]
        return f"process {int(found['pid'])} on {found['host']!s:.80} since {found['since']!s:.30} ({shown!s})"
    return "another process"
