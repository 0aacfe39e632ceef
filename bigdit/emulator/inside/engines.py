"""Loss scaling and DeepSpeed engines: steps that are skipped, and the first step, which real GPUs skip.

The first scale of 65536 overflows in fp16 there. On an emulated GPU nothing overflows. So in a second run the first
step is made to overflow. Then no optimizer state exists until the step after it. An engine's steps are counted as its
own, whatever optimizers it drives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from . import imports, notices, parent, steps

scales_loss = False
"""Whether the process scales its loss."""

_first = parent.SKIP_FIRST  # this is the first step, and must overflow
_overflows = False  # the same for DeepSpeed, within its step

_CHECKS = {
    "deepspeed.runtime.utils": ("CheckOverflow", ("check", "check_using_norm", "has_overflow")),
    "deepspeed.runtime.zero.stage_1_and_2": ("DeepSpeedZeroOptimizer", ("has_overflow",)),
    "deepspeed.runtime.zero.stage3": ("DeepSpeedZeroOptimizer_Stage3", ("has_overflow",)),
}
"""Where DeepSpeed checks gradients for overflow: module, class, methods."""


def install(torch: Any) -> None:
    """Follow torch's loss scaler, and DeepSpeed when it is imported."""
    scaler = torch.amp.GradScaler
    wrapped = {"step": _scaler_step, "_unscale_grads_": _unscale, "_maybe_opt_step": _opt_step, "update": _update}
    for name, wrap in wrapped.items():
        setattr(scaler, name, wrap(getattr(scaler, name)))
    imports.after("deepspeed.runtime.engine", _watch_engine)
    for module, (owner, names) in _CHECKS.items():
        imports.after(module, _answering(owner, names))


def _scaler_step(original: Any) -> Any:
    @wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        global scales_loss
        scales_loss |= bool(self._enabled)
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
        global _first
        try:
            return original(self, *args, **kwargs)
        finally:
            _first = _first and not self._enabled

    return update


def _watch_engine(module: Any) -> None:
    engine = module.DeepSpeedEngine
    engine.__init__ = _driving(engine.__init__)
    engine.backward = _within_backward(engine.backward)
    engine.step = _engine_step(engine.step)


def _driving(original: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed creates optimizer states by a step when it starts, which is no training step."""

    @wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        with steps.DrivenOptimizers():
            return original(self, *args, **kwargs)

    return start


def _within_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.before_backward()
        steps.enter(steps.BACKWARD)
        try:
            return original(self, *args, **kwargs)
        finally:
            steps.leave(steps.BACKWARD)

    return backward


def _engine_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _first, _overflows, scales_loss
        if not self.is_gradient_accumulation_boundary():
            return original(self, *args, **kwargs)
        steps.begin(self)
        scaled = self.fp16_enabled() and self.dynamic_loss_scale()
        scales_loss |= bool(scaled)
        before, _overflows = self.skipped_steps, bool(scaled and _first)
        steps.enter(steps.STEP)
        try:
            with steps.DrivenOptimizers():
                return original(self, *args, **kwargs)
        finally:
            steps.leave(steps.STEP)
            skipped = self.skipped_steps > before
            if skipped and not _overflows:
                notices.add("DeepSpeed skipped a step, as if its gradients had overflowed")
            _overflows = _first = False
            steps.complete(self, was_skipped=skipped)

    return step


def _answering(owner: str, names: tuple[str, ...]) -> Callable[[Any], None]:
    def watch(module: Any) -> None:
        for name in names:
            method = getattr(getattr(module, owner, None), name, None)
            if method is not None:
                setattr(getattr(module, owner), name, _or_overflow(method))

    return watch


def _or_overflow(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def check(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return True if _overflows else found

    return check
