"""Runs a user's command on emulated GPUs, logs where its processes wait, and collects their accounts."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from bigdit import log
from bigdit.emulator import janitor, smi
from bigdit.emulator.emulation import Account, EmulatedRun, read_account
from bigdit.errors import UserError

_OTHERS_END_WITHIN_S = 10.0
"""Launchers on other machines may notice a failure by themselves, and then say what they waited for."""

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_INSIDE = str(Path(__file__).with_name("inside"))
_WRITTEN_WITHIN_S = 1.0

_NETWORKS = """set -e
ip link add bridge type bridge
ip link set bridge up
for node in $(seq "$1"); do
    { unshare -n -u -m sh -ec '
        ip link set lo up
        ip link add eth0 type veth peer name "node$1" netns "$2"
        nsenter -t "$2" -n ip link set "node$1" master bridge up
        ip address add "10.0.0.$1/24" dev eth0
        ip link set eth0 up
        hostname "node$1"
        mount --bind "$3" /etc/hosts
        echo "$1 $$"
        exec sleep infinity' sh "$node" "$$" "$2" || kill 0; } &
done
wait
"""
"""Gives each of $1 machines a network and a name, joined by a bridge in the network of this shell; prints the number of
each, and a process in it. $2: their /etc/hosts."""


def run_emulated(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    *,
    steps: int | None = None,
    skip_first: bool = False,
    snapshots: Path | None = None,
    stdout_to_stderr: bool = False,
    own_networks: bool = False,
) -> EmulatedRun:
    """Run `command` once for each of `environments`, a machine each, to its end or for `steps` optimizer steps.

    An environment is added to this process's. `folder`: from `workplace()`. `skip_first`: the loss scaler's first step
    overflows. `snapshots`: a folder for files of PyTorch's memory_viz. The command's output is not captured.
    `own_networks`: each machine has a network of its own.

    Raises UserError if it cannot be started or emulated.
    """
    by_slurm = _by_slurm(command)
    path = f"{_programs(folder)}{os.pathsep}{environments[0].get('PATH', os.environ.get('PATH', os.defpath))}"
    program = shutil.which(command[0], path=path)
    if program is None:
        script = command[0].endswith(".py") and os.path.exists(command[0])
        fix = f"it is a script: -- python {command[0]}" if script else "give it after --, as in a shell"
        raise UserError(f"the command {command[0]!r} was not found; {fix}")
    accounts = Path(tempfile.mkdtemp(prefix="accounts-", dir=folder))
    began = time.monotonic()
    asked = {
        "PATH": path,
        "BIGDIT_EMULATED_OUT": str(accounts),
        "BIGDIT_EMULATED_STEPS": str(steps or 0),
        "BIGDIT_EMULATED_SKIP_FIRST": str(int(skip_first)),
        "BIGDIT_EMULATED_SNAPSHOT": str(int(snapshots is not None)),
    }
    if by_slurm:
        asked["BIGDIT_EMULATED_NODES"] = "\n".join(each["BIGDIT_EMULATED_GPU"] for each in environments)
        environments = environments[:1]  # SLURM starts the tasks of all machines
    if own_networks and (by_slurm or len(environments) == 1):
        raise UserError("--own-networks is for several machines that bigdit starts: --nodes 2 -- torchrun …")
    nodes = _of_nodes(len(environments), own_networks)
    merged = [{**os.environ, **each, **node, **asked} for each, node in zip(environments, nodes, strict=True)]
    entering = _networks(len(nodes), folder) if own_networks else [[]] * len(nodes)
    status = _wait([[*enter, program, *command[1:]] for enter in entering], merged, folder, stdout_to_stderr)
    _refuse(accounts, status)
    return _gather(accounts, status, time.monotonic() - began, skip_first, snapshots)


def _by_slurm(command: Sequence[str]) -> bool:
    """Whether SLURM starts the processes. Raises UserError where the command returns before they have ended."""
    name = Path(command[0]).name
    if name == "sbatch" and not {"-W", "--wait"} & {*command}:
        raise UserError("sbatch returns before its job has run, and emulated GPUs end then; write sbatch --wait")
    return name in ("sbatch", "srun", "salloc")


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A temporary folder. It is removed at the end, with all processes of the emulation, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="bigdit-emulate-"))
    waiting = subprocess.Popen(
        [sys.executable, "-I", "-S", janitor.__file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield folder
    finally:
        assert waiting.stdin is not None
        waiting.stdin.close()
        waiting.wait()


def _programs(folder: Path) -> Path:
    """A folder with an `nvidia-smi` for the emulated GPU, which comes first on PATH."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    program = programs / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(smi.__file__)} "$@"\n')
    program.chmod(0o755)
    return programs


def _networks(count: int, folder: Path) -> list[list[str]]:
    """The words that start a command in each machine's network. The networks end with the processes of `folder`. Raises
    UserError where the system gives none."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"10.0.0.{at} node{at}\n" for at in range(1, count + 1)))
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))  # where Debian has ip
    programs = {name: shutil.which(name, path=path) for name in ("unshare", "nsenter", "ip", "hostname")}
    if missing := [name for name, found in programs.items() if found is None]:
        raise UserError(f"--own-networks needs {' and '.join(missing)}; install util-linux, iproute2 and hostname")
    new, enter = (["-r"], ["-U", "--preserve-credentials"]) if os.geteuid() else ([], [])
    made = subprocess.Popen(
        [str(programs["unshare"]), *new, "-n", "sh", "-c", _NETWORKS, "sh", str(count), str(hosts)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PATH": path, "BIGDIT_EMULATED_OUT": f"{folder}/networks"},
        start_new_session=True,
        text=True,
    )
    assert made.stdout is not None
    pids = dict(line.split() for line in itertools.islice(made.stdout, count))
    if len(pids) < count:
        why = " ".join(made.communicate()[1].split("\n")[:1])
        raise UserError(f"--own-networks needs network namespaces, which this machine refuses: {why}; leave it out")
    started = [str(programs["nsenter"]), *enter, "-n", "-u", "-m", "-t"]
    here = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]  # entering leaves the folder
    return [[*started, pids[str(at)], *here] for at in range(1, count + 1)]


def _of_nodes(count: int, own_networks: bool) -> list[dict[str, str]]:
    """For each of several machines, what launchers ask for: torchrun as PET_…, and a script's own command line."""
    if count == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as server:
        alike = {"NNODES": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    each = [{**alike, "NODE_RANK": str(rank)} for rank in range(count)]
    if own_networks:
        own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
        own |= {f"{library}_SOCKET_IFNAME": "eth0" for library in ("GLOO", "NCCL", "TP")}
        each = [{**one, **own, "LOCAL_ADDR": f"10.0.0.{rank + 1}"} for rank, one in enumerate(each)]
    return [{**one, **{f"PET_{name}": value for name, value in one.items()}} for one in each]


def _wait(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], folder: Path, stdout_to_stderr: bool
) -> int:
    """Run each machine's command; returns the first exit status but 0, as in a shell. Where one fails, the others
    end after a while. When this process ends, the command's processes end too."""
    stdout = sys.stderr if stdout_to_stderr else None
    try:
        processes = [
            subprocess.Popen(command, env=each, stdout=stdout, start_new_session=True)
            for command, each in zip(commands, environments, strict=True)
        ]
    except OSError as error:
        raise UserError(f"{commands[0][0]} cannot be run: {error.strerror}") from error
    with _forward_signals(processes, folder):
        status = _first_failure(processes)
        if status:
            log_waiting(folder)
    janitor.end(folder)
    return status if status >= 0 else 128 - status


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """The exit status of the first that fails; 0 if none does."""
    if len(processes) == 1:
        return processes[0].wait()
    status, ends = 0, math.inf
    while None in (statuses := [each.poll() for each in processes]) and time.monotonic() < ends:
        if not status and any(statuses):
            status, ends = next(filter(None, statuses)), time.monotonic() + _OTHERS_END_WITHIN_S
        time.sleep(0.1)
    return status or next(filter(None, statuses), 0)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _forward_signals(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> Iterator[None]:
    """Forward SIGINT and SIGTERM to the commands, and log where their processes were. They end this process after the
    commands: SIGTERM with the status that a shell gives."""
    came: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            log_waiting(folder)
        for process in processes:
            _signal(process, number if len(came) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came[:1] == [signal.SIGTERM]:
        log.notice("SIGTERM: stopped without a report")
        raise SystemExit(128 + signal.SIGTERM)
    if came:
        raise KeyboardInterrupt


def log_waiting(folder: Path) -> None:
    """Log a line for each Python process that still runs, by rank. Launchers, and a process's own workers, are left
    out."""
    files = {int(file.stem.removeprefix("where-")): file for file in folder.glob("accounts-*/where-*.txt")}
    alive = {pid: environment for pid in files if (environment := _environment_of(pid)) is not None}
    ranks = {pid: environment.get("RANK", environment.get("SLURM_PROCID")) for pid, environment in alive.items()}
    parents = {pid: int(environment["PPID"]) for pid, environment in alive.items()}
    workers = {pid for pid, parent in parents.items() if parent in ranks and ranks[parent] == ranks[pid]}
    launchers = {parent for pid, parent in parents.items() if pid not in workers}
    asked = [pid for pid in alive if pid not in workers | launchers]
    for pid in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    while any(not files[pid].stat().st_size for pid in asked) and time.monotonic() < deadline:
        time.sleep(0.05)
    for line in sorted(filter(None, (_waiting_line(pid, alive[pid], files[pid].read_text()) for pid in asked))):
        log.notice(line)


def _environment_of(pid: int) -> dict[str, str] | None:
    """The variables of a process, and its parent as PPID; None if it has ended."""
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return dict(each.split("=", 1) for each in found if "=" in each) | {"PPID": status[1]}


def _waiting_line(pid: int, environment: dict[str, str], stack: str) -> str:
    """Who it is, the function that it waits in, and the line of the script that called it."""
    frames = [each for each in map(re.Match.groupdict, _FRAME.finditer(stack)) if _INSIDE not in each["file"]]
    if not frames:
        return ""
    by_slurm = environment if "BIGDIT_EMULATED_NODES" in environment else {}
    rank = environment.get("RANK", by_slurm.get("SLURM_PROCID"))
    node = environment.get("NODE_RANK", by_slurm.get("SLURM_NODEID"))
    who = f"process {pid}" if rank is None else f"rank {rank}, process {pid}"
    who += "" if node is None else f" of machine {int(node) + 1}"
    own = next(
        (each for each in frames if "/site-packages/" not in each["file"] and "/lib/python" not in each["file"]), None
    )
    inner = frames[0]
    at = "" if own in (None, inner) else f", called at {Path(own['file']).name}:{own['line']}"
    return f"{who} is in {inner['name']} ({Path(inner['file']).name}:{inner['line']}){at}"


def _refuse(folder: Path, status: int) -> None:
    """Raise UserError if a process could not be emulated. If the command succeeded without it, log the reason."""
    found = (_text(path, "reason") for path in sorted(folder.glob("refused-*.json")))
    reasons = dict.fromkeys(reason for reason in found if reason)
    if reasons and status:
        raise UserError(*reasons)
    for reason in reasons:
        log.notice(f"note: a process of the command was not emulated: {reason}")


def _gather(folder: Path, status: int, seconds: float, skip_first: bool, snapshots: Path | None) -> EmulatedRun:
    accounts: list[Account] = []
    lost = []
    for begun in sorted(folder.glob("begun-*.json")):
        name = begun.stem.removeprefix("begun-")
        pid, _, before = name.partition("-")
        account = read_account(folder / f"account-{name}.json")
        if account is None:
            lost.append(int(pid) if pid.isdigit() else 0)
        elif account.gpus:
            accounts.append(account)
            _keep_snapshot(folder / f"snapshot-{name}.pickle", account, before, snapshots)
    accounts.sort(key=lambda each: (each.rank is None, each.rank or 0, each.pid))
    crowds = (_text(path, "processes") for path in folder.glob("crowd-*.json"))
    absent = (_text(path, "repository") for path in folder.glob("absent-*.json"))
    return EmulatedRun(
        first_step_skipped=skip_first,
        exit_status=status,
        seconds=seconds,
        accounts=tuple(accounts),
        lost=tuple(lost),
        crowd=max((int(count) for count in crowds if count.isdigit()), default=0),
        absent=tuple(sorted(set(filter(None, absent)))) if status else (),
    )


def _keep_snapshot(found: Path, account: Account, before: str, snapshots: Path | None) -> None:
    """Move a process's snapshot, without reading it, to `snapshots`. `before`: the number of its earlier programs."""
    if snapshots is None or not found.is_file():
        return
    name = f"pid{account.pid}" if account.rank is None else f"rank{account.rank}"
    name += "" if before == "0" else f"-{before}"
    snapshots.mkdir(parents=True, exist_ok=True)
    shutil.move(found, snapshots / f"snapshot-{name}.pickle")


def _text(path: Path, key: str) -> str:
    """A line of text that a process wrote; empty if it is missing."""
    try:
        found = json.loads(path.read_text()[:10_000])
    except (OSError, ValueError):
        return ""
    value = found.get(key, "") if isinstance(found, dict) else ""
    return " ".join(str(value).split())
