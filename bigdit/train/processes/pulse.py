"""Each process tells the run's store, every few seconds, where its main thread is, and watches the next rank for that.

So a process that stops answering is named with the line it was last at. One whose threads all stand still, or whose
machine does, is found even where the others wait for a GPU, which no error reaches.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from bigdit.dist import World

EVERY_S = 2.0
_PACKAGE = Path(__file__).parents[2]
_AROUND = str(_PACKAGE / "train" / "monitor" / "seconds.py")  # its frames surround every collective
_LEFT = "left"


class Pulse:
    """`silent(rank)` is called, once, where the next rank has not told anything for `limit()` seconds."""

    def __init__(
        self, store: dist.Store, world: World, limit: Callable[[], float], silent: Callable[[int], None]
    ) -> None:
        """`store`: the one by which the processes meet. A connection of its own does not wait for the main thread."""
        own = store.clone()
        own.set_timeout(timedelta(seconds=60))
        self._store = dist.PrefixStore("pulse", own)
        self._world, self._limit, self._silent = world, limit, silent
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(EVERY_S)

    def _run(self) -> None:
        own, watched = str(self._world.rank), (self._world.rank + 1) % self._world.world_size
        beats, before, since = 0, "", 0
        try:
            while True:
                every = min(EVERY_S, self._limit() / 4)
                beats += 1
                self._store.set(own, f"{beats} {_place(sys._current_frames().get(self._main or 0))}")
                found = self._store.get(str(watched)).decode() if self._store.check([str(watched)]) else ""
                if found != before:
                    before, since = found, beats
                # Counted in beats: none passes while this process is stopped too.
                elif found not in ("", _LEFT) and (beats - since) * every > self._limit():
                    self._silent(watched)
                    return
                if self._over.wait(every):
                    self._store.set(own, _LEFT)
                    return
        except RuntimeError:  # the store has ended, or does not answer
            return


def last_place(store: dist.Store, rank: int) -> str | None:
    """Where that rank's main thread was last, as `file:line (function)`; None where it told nothing."""
    key = f"pulse/{rank}"
    found = store.get(key).decode() if store.check([key]) else ""
    return found.partition(" ")[2] or None


def _place(frame: FrameType | None) -> str:
    """The innermost frame of bigdit, else the innermost of all."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if Path(file).is_relative_to(_PACKAGE) and file != _AROUND:
            return f"{Path(file).relative_to(_PACKAGE.parent)}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "" if innermost is None else f"{innermost.f_code.co_filename}:{innermost.f_lineno}"
