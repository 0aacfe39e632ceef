"""Loss scaling: whether it is there, what it skips, and the first step that it skips on real cards.

The first scale of 65536 overflows in fp16 there. On an emulated card nothing overflows, so a second run is told to
find that its first step did: then no optimizer state exists until the step after it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from . import notices, options, steps

seen = False
_first = options.SKIP_FIRST


def install(torch: Any) -> None:
    scaler = torch.amp.GradScaler
    wrapped = {"step": _step, "_unscale_grads_": _unscale, "_maybe_opt_step": _opt_step, "update": _update}
    for name, wrap in wrapped.items():
        setattr(scaler, name, wrap(getattr(scaler, name)))


def first_overflows() -> bool:
    """Whether the step at hand is the first, and is to overflow."""
    return _first


def first_is_over() -> None:
    global _first
    _first = False


def see() -> None:
    global seen
    seen = True


def _step(original: Any) -> Any:
    @wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._enabled:
            see()
        return original(self, optimizer, *args, **kwargs)

    return step


def _unscale(original: Any) -> Any:
    @wraps(original)
    def unscale(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if _first:
            for value in found.values():
                value.fill_(1.0)
        return found

    return unscale


def _opt_step(original: Any) -> Any:
    @wraps(original)
    def opt_step(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        overflows = bool(sum(value.item() for value in optimizer_state["found_inf_per_device"].values()))
        result = original(self, optimizer, optimizer_state, *args, **kwargs)
        if overflows:
            steps.complete(optimizer, was_skipped=True)
            if not _first:
                notices.add("the loss scaler skipped a step, as if its gradients had overflowed")
        return result

    return opt_step


def _update(original: Any) -> Any:
    @wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            if self._enabled:
                first_is_over()

    return update
