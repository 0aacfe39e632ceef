"""Where the processes of an emulated command are in their code: what each waits for, if the command hangs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from bigdit import log

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_INSIDE = str(Path(__file__).with_name("inside"))
_WRITTEN_WITHIN_S = 1.0


def log_waiting(folder: Path) -> None:
    """Log a line for each Python process that still runs, by rank. Launchers, and a process's own workers, are left
    out."""
    files = {int(file.stem.removeprefix("where-")): file for file in folder.glob("accounts-*/where-*.txt")}
    alive = {pid: environment for pid in files if (environment := _environment(pid)) is not None}
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
    for line in sorted(filter(None, (_line(pid, alive[pid], files[pid].read_text()) for pid in asked))):
        log.notice(line)


def _environment(pid: int) -> dict[str, str] | None:
    """The variables of a process, and its parent as PPID; None if it has ended."""
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return dict(each.split("=", 1) for each in found if "=" in each) | {"PPID": status[1]}


def _line(pid: int, environment: dict[str, str], stack: str) -> str:
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
