"""Each time that a card's memory ran out, also where the script catches it."""

from __future__ import annotations

import sys
import threading
from typing import Any

from . import counts, history, notices, phases, steps

_MOST = 20
found: list[dict[str, Any]] = []
count = 0
_launched = 0  # before memory ran out last


def install(torch: Any) -> None:
    history.when_begun.append(lambda: torch._C._cuda_attach_out_of_memory_observer(observe))


def observe(card: int, asked: int, total: int, free: int) -> None:
    """Called by the allocator when it gives up, before it raises."""
    global count, _launched
    count += 1
    _launched = _launches()
    steps.stepped_after_oom = False
    if len(found) >= _MOST:
        return
    here = notices.of_stack(sys._getframe().f_back)
    main = notices.of_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    if notices.places(here)[0] is None:  # a thread of autograd: the script waits for it
        here += main
    found.append(
        {
            "card": card,
            "asked_bytes": asked,
            "free_bytes": free,
            "total_bytes": total,
            "phase": phases.now(),
            "steps": steps.done,
            "frames": notices.shown(here),
        }
    )


def computed_since() -> bool:
    """Whether anything was computed on a card after memory ran out last."""
    return count > 0 and _launches() > _launched


def forget() -> None:
    global count
    found.clear()
    count = 0


def _launches() -> int:
    counted = counts.read()
    return counted["launches"] + counted["library_calls"]
