"""Sends metrics to TensorBoard, W&B and others, from a separate process so that training never waits.

That process, `python -m` of this module, reads lines of JSON from stdin and calls accelerate's trackers. It uses no
GPU, ignores signals, and ends with training in any case, because that closes stdin.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from bigdit import libraries, log
from bigdit.errors import shown
from bigdit.processes import own_module, undisturbed

PATIENCE_S = 60.0
"""The most seconds that a run waits for the last rows at its end."""

_OURS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_")


class Trackers:
    """Sends rows to accelerate's trackers of these `names`; does nothing without names, or if not `shown`.

    A tracker that fails is logged once, and training continues. `start`: the step that training resumes from. `run`:
    the settings that trackers store.
    """

    def __init__(self, names: Sequence[str], output: Path, start: int, run: Mapping[str, Any], *, shown: bool) -> None:
        self._rows: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not names or not shown:
            return
        with undisturbed():
            self._process = subprocess.Popen(
                [sys.executable, *own_module("bigdit.train.monitor.trackers")],
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                env={name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
                | {"CUDA_VISIBLE_DEVICES": ""},
                text=True,
            )
        self._put({"names": list(names), "folder": str(output.resolve()), "start": start, "run": run})
        self._thread = threading.Thread(target=self._hand_over, name="trackers", daemon=True)
        self._thread.start()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is None:
            return
        self._rows.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._process.kill()
            log.notice(f"note: trackers did not take the last rows within {PATIENCE_S:.0f} s; metrics.jsonl has all")

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send these rows, without waiting."""
        for row in rows:
            self._put(row)

    def show(self, step: int, image: Path) -> None:
        """Send a grid of images that was generated after `step` steps."""
        self._put({"step": step, "image": str(image.resolve())})

    def _put(self, value: Mapping[str, Any]) -> None:
        self._rows.put(json.dumps(value) + "\n")

    def _hand_over(self) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (line := self._rows.get()) is not None:
                    pipe.write(line)
                    pipe.flush()
        except OSError:
            log.notice(
                "note: the process of the trackers has ended; training continues without it, metrics.jsonl has all"
            )
        self._process.wait()


PROJECT = "bigdit"


def main() -> int:
    """Pass rows on until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    libraries.prepare()
    from accelerate import PartialState

    PartialState(cpu=True)  # without it no tracker logs
    trackers = {name: _Guarded(name, settings) for name in settings["names"]}
    for line in sys.stdin:
        row = json.loads(line)
        for tracker in trackers.values():
            if "image" in row:
                tracker.show(row["step"], Path(row["image"]))
            else:
                tracker.do("log", dict(_numbers(row)), step=row["step"])
    for tracker in trackers.values():
        tracker.do("finish")
    return 0


class _Guarded:
    """One tracker. If it fails, that is logged, and it is not called again."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        self._tracker: Any = None
        self._guard(lambda: self._start(settings))

    def do(self, method: str, *values: object, **options: object) -> None:
        """Call a method of the tracker, unless it failed before."""
        if self._tracker is not None:
            self._guard(lambda: getattr(self._tracker, method)(*values, **options))

    def show(self, step: int, image: Path) -> None:
        """Show an image, if the tracker can."""
        if hasattr(self._tracker, "log_images"):
            layout = {"dataformats": "NHWC"} if self._name == "tensorboard" else {}
            self.do("log_images", {"samples": _pixels(image)[None]}, step=step, **layout)

    def _start(self, settings: Mapping[str, Any]) -> None:
        kind = _kind(self._name)
        os.environ.setdefault("WANDB_DIR", settings["folder"])  # else it writes to the working directory
        if self._name == "tensorboard":
            # Readers then skip an earlier start's values of the same steps.
            tracker = kind(self._name, settings["folder"], purge_step=settings["start"] + 1)
        elif kind.requires_logging_directory:
            tracker = kind(PROJECT, settings["folder"])
        else:
            tracker = kind(PROJECT)
        tracker.start()
        if self._name != "tensorboard":  # its table of settings would get a row at every start
            tracker.store_init_configuration(settings["run"])
        self._tracker = tracker

    def _guard(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # whatever a tracker raises: its network, its disk, its account
            reason = shown(" ".join(f"{type(error).__name__}: {error}".split())[:200])
            log.notice(f"note: trackers: {self._name} failed ({reason}); training continues without it")
            self._tracker = None


def _kind(name: str) -> Any:
    """accelerate's tracker of this name."""
    if name == "wandb":
        return _any_order()
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS[name]


def _any_order() -> Any:
    """W&B's tracker for rows and images in any order: an image is decoded while later steps are taken."""
    from accelerate.tracking import WandBTracker

    class AnyOrder(WandBTracker):
        """W&B drops rows whose step is lower than the last. Here `step` is a value like others, and the x axis."""

        def start(self) -> None:
            """Begin a run."""
            super().start()
            self.run.define_metric("*", step_metric="step")

        def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
            """Log values after `step` steps."""
            super().log({**values, "step": step}, **options)

    return AnyOrder


def _pixels(image: Path) -> npt.NDArray[np.uint8]:
    """[height, width, 3]."""
    with Image.open(image) as opened:
        return np.asarray(opened.convert("RGB"))


def _numbers(row: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row by their names; those of a nested mapping as `name/key`."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{under}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
            yield f"{under}{key}", value


if __name__ == "__main__":
    sys.exit(main())
