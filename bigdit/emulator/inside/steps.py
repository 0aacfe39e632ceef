"""Optimizer steps: counted, ended after, and looked at for what would make the figures wrong.

A training step is a step of the optimizer that has stepped most: two optimizers that take turns, or one for each
parameter, make one step together, as one does that steps chunk by chunk, without a backward pass between. Those that an
engine of DeepSpeed drives are counted by the engine.
"""

from __future__ import annotations

import weakref
from typing import Any

from . import counts, ending, notices, options, phases

done = 0
skipped = 0
backwards = 0
stepped_after_oom = False

_by_driver: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_seen_by_driver: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # backward passes at its last step
_looked_at: weakref.WeakSet[Any] = weakref.WeakSet()
_within_engine = 0
_torch: Any = None


def install(torch: Any) -> None:
    global _torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    _torch = torch
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
    phases.before_backward.append(before_backward)


def begin(driver: Any) -> None:
    """`driver`, an optimizer or an engine, begins a step, or goes on with one."""
    if options.STEPS and _by_driver.get(driver, 0) >= options.STEPS and not _goes_on(driver):
        ending.end_after_steps()


def complete(driver: Any, *, was_skipped: bool = False) -> None:
    """`driver` has stepped, or its loss scaler has skipped a step."""
    global done, skipped, stepped_after_oom
    if _goes_on(driver):
        return
    _seen_by_driver[driver] = backwards
    _by_driver[driver] = _by_driver.get(driver, 0) + 1
    skipped += was_skipped
    if _by_driver[driver] > done:
        done = _by_driver[driver]
        stepped_after_oom = True
        counts.sample()
        if done == options.STEPS:
            phases.end_at_next_forward(_torch)


def _goes_on(driver: Any) -> bool:
    """Whether `driver` is within a step that was counted: no backward pass ran since. Gradients may come without."""
    return backwards > 0 and _seen_by_driver.get(driver) == backwards


def before_backward() -> None:
    """Count it; the step that would follow is one too many where all were taken."""
    global backwards
    if options.STEPS and done >= options.STEPS:
        ending.end_after_steps()
    backwards += 1


class Engine:
    """Within it an engine drives optimizers, which are not counted themselves."""

    def __enter__(self) -> None:
        global _within_engine
        _within_engine += 1

    def __exit__(self, *_: object) -> None:
        global _within_engine
        _within_engine -= 1


def forget() -> None:
    global done, skipped, backwards, stepped_after_oom, _within_engine
    done = skipped = backwards = _within_engine = 0
    stepped_after_oom = False
    _seen_by_driver.clear()


def _before(optimizer: Any, args: Any, kwargs: Any) -> Any:
    if _within_engine:
        return None
    begin(optimizer)
    phases.enter(phases.STEP)
    if len(args) > 1 and callable(args[1]):
        return (args[0], phases.outside(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": phases.outside(kwargs["closure"])}
    return None


def _after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not _within_engine:
        phases.leave(phases.STEP)
        complete(optimizer)
        if optimizer not in _looked_at:
            _looked_at.add(optimizer)
            _look_at_state(optimizer)


def _look_at_state(optimizer: Any) -> None:
    """An optimizer without state after its step takes less memory than it will: say so."""
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    name = type(optimizer).__name__
    plain = name == "SGD" and not any(group.get("momentum") for group in optimizer.param_groups)
    if stepped and not plain and not any(optimizer.state.get(p) for p in stepped):
        notices.add(
            f"{name} holds no state after its step: the peak may miss what it will keep for "
            f"{len(stepped)} parameters with gradients"
        )
