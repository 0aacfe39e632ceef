"""The phases of a step (start, forward, backward, step) and the optimizer steps of a process.

`backward` is within torch.autograd.backward and grad, with recomputation; `step` is within an optimizer's step;
`forward` is the rest. Everything before the first forward of a trained module is `start`.

A training step is a step of the optimizer that has stepped most. Two optimizers that alternate, or one for each
parameter, make one step together. So does an optimizer that steps in chunks without a backward pass between them. A
DeepSpeed engine counts the steps of its own optimizers.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from . import ending, history, libraries, notices, parent

START, FORWARD, BACKWARD, STEP = "start", "forward", "backward", "step"

done = 0
skipped = 0
backwards = 0
stepped_after_oom = False

_base = START
_stack: list[str] = []
_by_driver: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_seen_by_driver: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # backward passes at its last step
_checked: weakref.WeakSet[Any] = weakref.WeakSet()
_within_engine = 0
_torch: Any = None


def install(torch: Any) -> None:
    """Follow torch's backward passes and optimizers."""
    global _torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    _torch = torch
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _within_backward(getattr(torch.autograd, name)))
    _watch_first_forward(torch)
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def phase() -> str:
    """The current phase."""
    return _stack[-1] if _stack else _base


def enter(entered: str) -> None:
    """Begin a phase within the current one."""
    _stack.append(entered)
    _mark()


def leave(left: str) -> None:
    """Return to the phase around `left`. Phases within it that an error left open are dropped."""
    if left in _stack:
        del _stack[_stack.index(left) :]
        _mark()


def outside(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` without the current phases: an optimizer's closure has a whole forward and backward in it."""

    @wraps(run)
    def suspended(*args: Any, **kwargs: Any) -> Any:
        within, _stack[:] = _stack[:], []
        _mark()
        try:
            return run(*args, **kwargs)
        finally:
            _stack[:] = within
            _mark()

    return suspended


def begin(driver: Any) -> None:
    """`driver`, an optimizer or an engine, begins a step, or continues one."""
    if parent.STEPS and _by_driver.get(driver, 0) >= parent.STEPS and not _continues(driver):
        ending.end_after_steps()


def complete(driver: Any, *, was_skipped: bool = False) -> None:
    """`driver` has stepped, or its loss scaler has skipped a step."""
    global done, skipped, stepped_after_oom
    if _continues(driver):
        return
    _seen_by_driver[driver] = backwards
    _by_driver[driver] = _by_driver.get(driver, 0) + 1
    skipped += was_skipped
    if _by_driver[driver] > done:
        done = _by_driver[driver]
        stepped_after_oom = True
        libraries.sample_counts()
        if done == parent.STEPS:
            _end_at_next_forward(_torch)


def before_backward() -> None:
    """Count a backward pass. After the last step, end the process instead."""
    global backwards
    if parent.STEPS and done >= parent.STEPS:
        ending.end_after_steps()
    backwards += 1


class DrivenOptimizers:
    """A context in which an engine drives optimizers, which are not counted themselves."""

    def __enter__(self) -> None:
        global _within_engine
        _within_engine += 1

    def __exit__(self, *_: object) -> None:
        global _within_engine
        _within_engine -= 1


def forget() -> None:
    global done, skipped, backwards, stepped_after_oom, _within_engine, _base
    done = skipped = backwards = _within_engine = 0
    stepped_after_oom = False
    _seen_by_driver.clear()
    _base = START
    _stack.clear()


def _mark() -> None:
    place, _ = notices.places(notices.of_stack(sys._getframe(1)))
    history.mark(phase(), place)


def _within_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def within(*args: Any, **kwargs: Any) -> Any:
        global _base
        if BACKWARD not in _stack:  # a recomputation in another thread is within it
            before_backward()
        elif _stack[-1] == BACKWARD:
            return run(*args, **kwargs)
        enter(BACKWARD)
        try:
            return run(*args, **kwargs)
        finally:
            _base = FORWARD  # even if no module was called
            leave(BACKWARD)

    return within


def _watch_first_forward(torch: Any) -> None:
    """The first step begins when a module with trained parameters is called with gradients enabled."""

    def before(module: Any) -> None:
        global _base
        if _trains(torch, module):
            stop()
            _base = FORWARD
            if not _stack:
                _mark()

    stop = _before_calls(torch, before)


def _before_calls(torch: Any, do: Callable[[Any], None]) -> Callable[[], None]:
    """Call `do` before each call of a module, until the returned function is called.

    Global hooks of modules would do so too, but they become part of compiled graphs, and break them.
    """
    module, original = torch.nn.Module, torch.nn.Module.__call__
    compiling, watching = torch.compiler.is_compiling, True

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not compiling() and watching:
            do(self)
        return original(self, *args, **kwargs)

    def stop() -> None:
        nonlocal watching
        watching = False
        if module.__call__ is call:
            module.__call__ = original

    module.__call__ = call
    return stop


def _trains(torch: Any, module: Any) -> bool:
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())


def _end_at_next_forward(torch: Any) -> None:
    """End the process before the next forward of a trained module."""

    def before(module: Any) -> None:
        if not _stack and _trains(torch, module):
            ending.end_after_steps()

    _before_calls(torch, before)


def _continues(driver: Any) -> bool:
    """Whether `driver` is within a step that is counted already: no backward pass ran since. Without any backward pass,
    each step counts."""
    return backwards > 0 and _seen_by_driver.get(driver) == backwards


def _before(optimizer: Any, args: Any, kwargs: Any) -> Any:
    if _within_engine:
        return None
    begin(optimizer)
    enter(STEP)
    if len(args) > 1 and callable(args[1]):
        return (args[0], outside(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": outside(kwargs["closure"])}
    return None


def _after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not _within_engine:
        leave(STEP)
        complete(optimizer)
        if optimizer not in _checked:
            _checked.add(optimizer)
            _check_state(optimizer)


def _check_state(optimizer: Any) -> None:
    """Add a notice for an optimizer without state after its step: it will take more memory."""
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    name = type(optimizer).__name__
    plain = name == "SGD" and not any(group.get("momentum") for group in optimizer.param_groups)
    if stepped and not plain and not any(optimizer.state.get(p) for p in stepped):
        notices.add(
            f"{name} has no state after its step: the peak may lack the state of {len(stepped)} parameters with "
            "gradients"
        )
