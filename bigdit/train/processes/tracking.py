"""The process beside training that hands rows of metrics, lines of JSON on stdin, to accelerate's trackers.

It has no card and no peers, hears no signal, and ends when stdin does: when training has, however that was.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from bigdit import libraries, log
from bigdit.errors import shown

PROJECT = "bigdit"


def main() -> int:
    """Hand over what comes until nothing comes any more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    said = json.loads(sys.stdin.readline())
    libraries.prepare()
    from accelerate import PartialState

    PartialState(cpu=True)  # without which no tracker logs
    trackers = {name: _Guarded(name, said) for name in said["names"]}
    for line in sys.stdin:
        row = json.loads(line)
        for tracker in trackers.values():
            if "picture" in row:
                tracker.show(row["step"], Path(row["picture"]))
            else:
                tracker.do("log", dict(_numbers(row)), step=row["step"])
    for tracker in trackers.values():
        tracker.do("finish")
    return 0


class _Guarded:
    """One tracker, until it fails: that is said, and what comes later passes it by."""

    def __init__(self, name: str, said: Mapping[str, Any]) -> None:
        self._name = name
        self._tracker: Any = None
        self._guard(lambda: self._start(said))

    def do(self, method: str, *values: object, **options: object) -> None:
        """Call a method of the tracker, while it works."""
        if self._tracker is not None:
            self._guard(lambda: getattr(self._tracker, method)(*values, **options))

    def show(self, step: int, picture: Path) -> None:
        """Show a picture, where the tracker shows any."""
        if hasattr(self._tracker, "log_images"):
            said = {"dataformats": "NHWC"} if self._name == "tensorboard" else {}
            self.do("log_images", {"samples": _pixels(picture)[None]}, step=step, **said)

    def _start(self, said: Mapping[str, Any]) -> None:
        kind = _kind(self._name)
        os.environ.setdefault("WANDB_DIR", said["folder"])  # else it writes where the command was given
        if self._name == "tensorboard":
            # What an earlier start wrote of steps that come again is passed over by who reads it.
            tracker = kind(self._name, said["folder"], purge_step=said["start"] + 1)
        elif kind.requires_logging_directory:
            tracker = kind(PROJECT, said["folder"])
        else:
            tracker = kind(PROJECT)
        tracker.start()
        if self._name != "tensorboard":  # whose table of settings would have a row more for every start
            tracker.store_init_configuration(said["run"])
        self._tracker = tracker

    def _guard(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # whatever a tracker raises: its network, its disk, its account
            reason = shown(" ".join(f"{type(error).__name__}: {error}".split())[:200])
            log.notice(f"note: trackers: {self._name} failed ({reason}); training goes on without it")
            self._tracker = None


def _kind(name: str) -> Any:
    """accelerate's tracker of this name."""
    if name == "wandb":
        from bigdit.train.processes.wandb_tracker import AnyOrder

        return AnyOrder
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS[name]


def _pixels(picture: Path) -> npt.NDArray[np.uint8]:
    """[height, width, 3]."""
    with Image.open(picture) as opened:
        return np.asarray(opened.convert("RGB"))


def _numbers(row: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row by their names; those of a mapping within as `name/key`."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{under}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
            yield f"{under}{key}", value


if __name__ == "__main__":
    sys.exit(main())
