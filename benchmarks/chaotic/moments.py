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
    """Of the processes that watch: the first that comes to its operation `number` on files in `root` stops before it
    (SIGSTOP), having said so in `said`. Where `number` is None, all operations are said, and none stops. Of training,
    the process of rank `rank` watches; of extraction all do."""

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
            if self.number in (None, at["count"]) and self._say(f"{os.getpid()} {event} {path.removeprefix(root)}\n"):
                os.kill(os.getpid(), signal.SIGSTOP)

        sys.addaudithook(hear)

    def _say(self, line: str) -> bool:
        """Whether the process is to stop: of those that come to the moment, the first."""
        first = os.O_APPEND if self.number is None else os.O_EXCL
        try:
            descriptor = os.open(self.said, os.O_WRONLY | os.O_CREAT | first, 0o666)
        except FileExistsError:
            return False
        os.write(descriptor, line.encode(errors="replace"))
        os.close(descriptor)
        return self.number is not None


def said(file: Path) -> list[tuple[int, str, str]]:
    """(process id, event, path) of what was said so far."""
    if not file.exists():
        return []
    rows = [line.split(" ", 2) for line in file.read_text().splitlines(keepends=True)]
    return [(int(row[0]), row[1], row[2].rstrip("\n")) for row in rows if row[-1].endswith("\n")]


def _path(arguments: Sequence[object]) -> str:
    first = arguments[0] if arguments else ""
    return os.fsdecode(first) if isinstance(first, str | bytes | os.PathLike) else ""


_PLACES = (
    ("while it exports", r"exports(/|$)"),
    ("while it cuts or writes metrics", r"(\.tmp-|before-)?[^/]*metrics\.jsonl"),
    ("while it writes the receipt", r"(\.tmp-)?receipt\.json"),
    ("while it writes for its page, or the page", r"(\.tmp-)?(run\.json|report\.html)"),
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
