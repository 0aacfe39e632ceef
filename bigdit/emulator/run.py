"""Run somebody's command on emulated cards, and gather what its processes have to say."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from bigdit import log
from bigdit.emulator import janitor, smi
from bigdit.emulator.emulation import Account, Run, read_account
from bigdit.errors import UserError


def run_emulated(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    steps: int | None = None,
    skip_first: bool = False,
    snapshots: Path | None = None,
    stdout_to_stderr: bool = False,
) -> Run:
    """Run `command` with `environment` beside its own, to its end or for so many optimizer `steps` of each process.

    `folder`: one of `workplace()`. `skip_first`: its loss scaler finds its first step to overflow. `snapshots`: a
    folder for PyTorch's page of memory. What it prints passes through.

    Raises UserError where it cannot be started, or cannot be emulated.
    """
    path = f"{_programs(folder)}{os.pathsep}{environment.get('PATH', os.environ.get('PATH', os.defpath))}"
    program = shutil.which(command[0], path=path)
    if program is None:
        raise UserError(f"the command {command[0]!r} was not found; what follows -- is run as a shell would run it")
    accounts = Path(tempfile.mkdtemp(prefix="accounts-", dir=folder))
    began = time.monotonic()
    asked = {
        "PATH": path,
        "BIGDIT_EMULATED_OUT": str(accounts),
        "BIGDIT_EMULATED_STEPS": str(steps or 0),
        "BIGDIT_EMULATED_SKIP_FIRST": str(int(skip_first)),
        "BIGDIT_EMULATED_SNAPSHOT": str(int(snapshots is not None)),
    }
    status = _wait([program, *command[1:]], {**os.environ, **environment, **asked}, folder, stdout_to_stderr)
    _refuse(accounts, status)
    return _gather(accounts, status, time.monotonic() - began, skip_first, snapshots)


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A temporary folder, that is gone afterwards with all processes that an emulation left, whatever happens."""
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
    """A folder with the programs that ask for the card, which stand before those of a card of this machine."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    program = programs / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(smi.__file__)} "$@"\n')
    program.chmod(0o755)
    return programs


def _wait(command: Sequence[str], environment: Mapping[str, str], folder: Path, stdout_to_stderr: bool) -> int:
    """The command's exit status, as a shell reports it. Whatever ends this process ends the command's processes."""
    stdout = sys.stderr if stdout_to_stderr else None
    try:
        process = subprocess.Popen(command, env=environment, stdout=stdout, start_new_session=True)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run: {error.strerror}") from error
    with _passed_on(process):
        status = process.wait()
    janitor.end(folder)
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGINT and SIGTERM go to the command, and end this process when it has ended."""
    came: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        came.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number if len(came) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _refuse(folder: Path, status: int) -> None:
    """Raise UserError where a process could not be emulated; say why where the command ended well without it."""
    said = (_text(path, "reason") for path in sorted(folder.glob("refused-*.json")))
    reasons = dict.fromkeys(reason for reason in said if reason)
    if reasons and status:
        raise UserError(*reasons)
    for reason in reasons:
        log.notice(f"note: a process of the command was not emulated: {reason}")


def _gather(folder: Path, status: int, seconds: float, skip_first: bool, snapshots: Path | None) -> Run:
    accounts: list[Account] = []
    lost = []
    for begun in sorted(folder.glob("begun-*.json")):
        name = begun.stem.removeprefix("begun-")
        pid, _, before = name.partition("-")
        account = read_account(folder / f"account-{name}.json")
        if account is None:
            lost.append(int(pid) if pid.isdigit() else 0)
        elif account.cards:
            accounts.append(account)
            _keep_snapshot(folder / f"snapshot-{name}.pickle", account, before, snapshots)
    accounts.sort(key=lambda each: (each.rank is None, each.rank or 0, each.pid))
    crowds = (_text(path, "processes") for path in folder.glob("crowd-*.json"))
    absent = (_text(path, "repository") for path in folder.glob("absent-*.json"))
    return Run(
        first_step_skipped=skip_first,
        exit_status=status,
        seconds=seconds,
        accounts=tuple(accounts),
        lost=tuple(lost),
        crowd=max((int(count) for count in crowds if count.isdigit()), default=0),
        absent=tuple(sorted(set(filter(None, absent)))) if status else (),
    )


def _keep_snapshot(found: Path, account: Account, before: str, snapshots: Path | None) -> None:
    """Move a process's snapshot, which is never opened here, to where it was asked for; `before`: how many programs it
    had been."""
    if snapshots is None or not found.is_file():
        return
    name = f"pid{account.pid}" if account.rank is None else f"rank{account.rank}"
    name += "" if before == "0" else f"-{before}"
    snapshots.mkdir(parents=True, exist_ok=True)
    shutil.move(found, snapshots / f"snapshot-{name}.pickle")


def _text(path: Path, key: str) -> str:
    """A line of text that a process wrote; empty where it is none."""
    try:
        found = json.loads(path.read_text()[:10_000])
    except (OSError, ValueError):
        return ""
    value = found.get(key, "") if isinstance(found, dict) else ""
    return " ".join(str(value).split())
