"""Rows of metrics for TensorBoard, W&B and others, which a process beside training hands over: nothing waits for it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigdit import log
from bigdit.checkout import own_module
from bigdit.die_with_parent import undisturbed

PATIENCE_S = 60.0
"""How long the end of a run waits for rows to be handed over, at most."""

_OURS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_")


class Trackers:
    """Hands rows to `names` of accelerate's trackers; without names, or `shown`, to nobody.

    What fails there is said once, and training goes on. The rows of `start` steps are there already; `run` is what the
    trackers keep as its settings.
    """

    def __init__(self, names: Sequence[str], output: Path, start: int, run: Mapping[str, Any], *, shown: bool) -> None:
        self._rows: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not names or not shown:
            return
        with undisturbed():
            self._process = subprocess.Popen(
                [sys.executable, *own_module("bigdit.train.processes.tracking")],
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                env={name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
                | {"CUDA_VISIBLE_DEVICES": ""},  # it computes nothing, and takes nothing of the card
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
        """These rows, some time."""
        for row in rows:
            self._put(row)

    def show(self, step: int, picture: Path) -> None:
        """A grid of pictures that was drawn after `step` steps."""
        self._put({"step": step, "picture": str(picture.resolve())})

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
            log.notice("note: the process of the trackers has ended; training goes on without, metrics.jsonl has all")
        self._process.wait()
