"""When a process is disturbed: before a file operation of its own on the folder that is watched."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.chmod",
    "os.truncate",
    "shutil.rmtree",
}
"""Python's audit events: each is raised before what it tells of is done."""


@dataclass(frozen=True)
class Moment:
    """Of the process of rank `rank` or of the name `worker`: before its operation `number` on files in `root` it
    stops (SIGSTOP), having said so in `said`. Where `number` is None, all operations are said, and none stops."""

    root: Path
    said: Path
    number: int | None = None
    rank: int = 0

    def watch(self) -> None:
        """Watch this process, and those that it forks, each for itself."""
        root, at = f"{self.root}/", {"pid": 0, "count": 0}

        def hear(event: str, arguments: Sequence[object]) -> None:
            if event not in _EVENTS:
                return
            path = _path(arguments)
            relative = event in ("os.remove", "os.rmdir") and not path.startswith("/")  # by shutil.rmtree
            if not (relative or path.startswith(root)):
                return
            if at["pid"] != os.getpid():
                at["pid"], at["count"] = os.getpid(), 0
            at["count"] += 1
            if self.number in (None, at["count"]):
                line = f"{os.getpid()} {event} {path.removeprefix(root)}\n"
                descriptor = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.write(descriptor, line.encode(errors="replace"))
                os.close(descriptor)
                if self.number is not None:
                    os.kill(os.getpid(), signal.SIGSTOP)

        sys.addaudithook(hear)


def said(file: Path) -> list[tuple[int, str, str]]:
    """(process id, event, path) of what was said so far."""
    if not file.exists():
        return []
    rows = [line.split(" ", 2) for line in file.read_text().splitlines()]
    return [(int(pid), event, path) for pid, event, path in rows]


def _path(arguments: Sequence[object]) -> str:
    first = arguments[0] if arguments else ""
    return os.fsdecode(first) if isinstance(first, str | bytes | os.PathLike) else ""


_PLACES = (
    ("while it exports", r"exports(/|$)"),
    ("while it cuts or writes metrics", r"(\.tmp-|before-)?[^/]*metrics\.jsonl"),
    ("while it writes the receipt", r"(\.tmp-)?receipt\.json"),
    ("while it moves `latest`", r"checkpoints/(\.tmp-)?latest"),
    ("while it takes its lock", r"lock"),
)


def place(event: str, path: str, pruned: bool) -> str:
    """What training was at, for people. `pruned`: the folder that is moved or deleted had been a whole checkpoint."""
    for name, pattern in _PLACES:
        if re.match(pattern, path):
            return name
    if event in ("os.remove", "os.rmdir", "shutil.rmtree") or pruned:
        return "while it prunes"
    if "/.tmp-" in f"/{path}" or event != "open":
        return "while it saves"
    return "while it reads a checkpoint" if path.startswith("checkpoints/") else "elsewhere"
