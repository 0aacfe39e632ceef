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
from bigdit.dist import World, asked_of_accelerate, launcher_holds_store, processes_here
from bigdit.documents import parse_json
from bigdit.errors import UserError, refused
from bigdit.files import WITHOUT_LOCKS
from bigdit.train.processes.end import STARTS

_LOG_AFTER_S = 10.0
"""A process that waits longer for the others logs that."""
_servers: list[dist.TCPStore] = []
"""That of the run, if this process holds it: it serves the others until this process ends."""
_TELL_S = 3.0
"""Seconds in which the others read from it why the run ends."""
_ANSWER_S = 20.0
"""Seconds that the run's store may take to answer at a port where something listens."""


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
                _meet(world, backend, timeout, meeting)
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
    address, port, size = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    line = f"waiting until all {size} processes of the run connect to {_shown(address, port)}, {limit}"
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


def _connected(world: World, address: str, port: int, meeting: float) -> dist.TCPStore:
    """The run's store. The first process holds its server, unless a launcher does."""
    where, found = _where(address, port), Future[dist.TCPStore]()
    holds = world.is_main and not launcher_holds_store()

    def ask() -> None:
        try:
            limit = timedelta(seconds=meeting)
            found.set_result(dist.TCPStore(address, port, timeout=limit, wait_for_workers=False))
        except BaseException as error:
            found.set_exception(error)

    another = f"another program, or another rank 0, uses the port of {where}; set another"
    lost = f"rank 0 does not reach its own machine at {where}; give an address of it"
    if holds:
        try:
            _servers.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        except RuntimeError as error:
            raise UserError(another) if "EADDRINUSE" in str(error) else error from error
    try:
        _wait_for_port((address, port), min(meeting, _ANSWER_S) if holds else meeting)
    except OSError as error:
        raise UserError(f"{lost if holds else _absent(where, meeting)}: {error}") from error
    threading.Thread(target=ask, daemon=True).start()
    try:
        return found.result(min(meeting, _ANSWER_S))
    except TimeoutError as error:  # torch would wait for another program's answer forever
        raise UserError(lost if holds else another) from error


def _join(store: dist.Store, world: World, absent: str) -> None:
    """Wait until every rank has joined once. Raises UserError on all processes if one is missing or does not belong."""
    own = f"rank {world.rank} (process {os.getpid()} on {socket.gethostname()})"
    machines = os.environ.get("GROUP_WORLD_SIZE")
    size = f"{world.world_size} processes" + (f" on {machines} machines" if machines else "")
    wanted, _, first = store.compare_set("size", "", f"{size}, and {own}").decode().partition(", and ")
    holder = store.compare_set(f"rank {world.rank}", "", own).decode()
    if wanted != size:
        wrong = f"{own} is one of {size}, and {first} of {wanted}; give all the same --nodes (WORLD_SIZE)"
        store.compare_set("end", "", wrong)
    elif holder != own:
        wrong = f"{holder} and {own} have the same number; give each machine its own --node-rank (RANK)"
        store.compare_set("end", "", wrong)
    elif store.add("joined", 1) == world.world_size:
        store.compare_set("end", "", "all joined")
    try:
        end = store.get("end")  # waits
    except dist.DistStoreError:
        missing = [other for other in range(world.world_size) if not store.check([f"rank {other}"])]
        why = f"{absent}: {len(missing)} of {size} are missing, the first is rank {min(missing, default=0)}"
        end = store.compare_set("end", "", why)
    if end == b"all joined":
        return
    if store.add(f"told {socket.gethostname()} {os.getppid()}", 1) == 1:  # once on each machine
        log.notice(f"error: {end.decode()}")
    time.sleep(_TELL_S if _servers else 0)
    raise UserError()


def _meet(world: World, backend: str, timeout: float, meeting: float) -> None:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise UserError(f"WORLD_SIZE is {world.world_size}, and MASTER_ADDR or MASTER_PORT does not say where to meet")
    absent = _absent(_where(address, port), meeting)
    try:
        store = _connected(world, address, int(port), meeting)
        started = dist.PrefixStore(f"start {os.environ.get(STARTS, '0')}", store)
        _join(dist.PrefixStore("join", started), world, absent)
        store.set_timeout(timedelta(seconds=timeout))
        dist.init_process_group(backend, store=started, rank=world.rank, world_size=world.world_size)
    except RuntimeError as error:  # errors of the network and of torch's store
        if refused(error):
            raise
        raise UserError(f"{absent}: {(str(error).splitlines() or [''])[0][:200]}") from error


def _shown(address: str, port: str | int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _where(address: str, port: str | int) -> str:
    return f"{_shown(address, port)} (--head, or MASTER_ADDR and MASTER_PORT)"


def _absent(where: str, meeting: float) -> str:
    return f"not all processes of the run connected to {where} within train.timeout, {meeting:g} s, or one ended"


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
