"""Where in a step a process is, as torch's own hooks tell it: start, forward, backward, step.

`backward` is within torch.autograd.backward and grad (recomputation nests in it), `step` within an optimizer's step,
`forward` the rest of a step. Everything before the first forward of a module that trains is `start`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from . import ending, history, notices

START, FORWARD, BACKWARD, STEP = "start", "forward", "backward", "step"

before_backward: list[Callable[[], None]] = []
"""Called where a backward pass begins."""

_base = START
_stack: list[str] = []


def now() -> str:
    return _stack[-1] if _stack else _base


def install(torch: Any) -> None:
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _within_backward(getattr(torch.autograd, name)))
    _watch_first_forward(torch)


def enter(phase: str) -> None:
    _stack.append(phase)
    mark()


def leave(phase: str) -> None:
    """Back to where `phase` was entered; what was entered within it and never left, by an error, is forgotten."""
    if phase in _stack:
        del _stack[_stack.index(phase) :]
        mark()


def outside(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` in no phase of its own: an optimizer's closure has a whole forward and backward in it."""

    @wraps(run)
    def suspended(*args: Any, **kwargs: Any) -> Any:
        within, _stack[:] = _stack[:], []
        mark()
        try:
            return run(*args, **kwargs)
        finally:
            _stack[:] = within
            mark()

    return suspended


def mark() -> None:
    place, _ = notices.places(notices.of_stack(sys._getframe(1)))
    history.mark(now(), place)


def forget() -> None:
    global _base
    _base = START
    _stack.clear()


def _within_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def within(*args: Any, **kwargs: Any) -> Any:
        global _base
        if BACKWARD not in _stack:  # the thread of a recomputation finds it there
            for each in before_backward:
                each()
        elif _stack[-1] == BACKWARD:
            return run(*args, **kwargs)
        enter(BACKWARD)
        try:
            return run(*args, **kwargs)
        finally:
            _base = FORWARD  # also where what trains is no module
            leave(BACKWARD)

    return within


def _watch_first_forward(torch: Any) -> None:
    """A module with parameters that train is called with gradients on: the first step begins."""

    def before(module: Any, _: Any) -> None:
        global _base
        if trains(torch, module):
            handle.remove()
            _base = FORWARD
            if not _stack:
                mark()

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before)


def trains(torch: Any, module: Any) -> bool:
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())


def end_at_next_forward(torch: Any) -> None:
    """End the process before the next forward of a module that trains."""

    def before(module: Any, _: Any) -> None:
        if not _stack and trains(torch, module):
            ending.end_after_steps()

    torch.nn.modules.module.register_module_forward_pre_hook(before)
