"""Steps of a DeepSpeed engine: counted as its own, whatever optimizers it drives within them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from . import imports, loss_scaler, notices, phases, steps

_overflows = False  # the step at hand is to overflow

_CHECKS = {
    "deepspeed.runtime.utils": ("CheckOverflow", ("check", "check_using_norm", "has_overflow")),
    "deepspeed.runtime.zero.stage_1_and_2": ("DeepSpeedZeroOptimizer", ("has_overflow",)),
    "deepspeed.runtime.zero.stage3": ("DeepSpeedZeroOptimizer_Stage3", ("has_overflow",)),
}
"""Where DeepSpeed asks whether gradients overflowed: module, class, methods."""


def install() -> None:
    imports.after("deepspeed.runtime.engine", _watch_engine)
    for module, (owner, names) in _CHECKS.items():
        imports.after(module, _answering(owner, names))


def _watch_engine(module: Any) -> None:
    engine = module.DeepSpeedEngine
    engine.__init__ = _driving(engine.__init__)
    engine.backward = _within_backward(engine.backward)
    engine.step = _step(engine.step)


def _driving(original: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed makes states by a step while it starts: of no training step."""

    @wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        with steps.Engine():
            return original(self, *args, **kwargs)

    return start


def _within_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.before_backward()
        phases.enter(phases.BACKWARD)
        try:
            return original(self, *args, **kwargs)
        finally:
            phases.leave(phases.BACKWARD)

    return backward


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _overflows
        if not self.is_gradient_accumulation_boundary():
            return original(self, *args, **kwargs)
        steps.begin(self)
        scaled = self.fp16_enabled() and self.dynamic_loss_scale()
        if scaled:
            loss_scaler.see()
        before, _overflows = self.skipped_steps, scaled and loss_scaler.first_overflows()
        phases.enter(phases.STEP)
        try:
            with steps.Engine():
                return original(self, *args, **kwargs)
        finally:
            phases.leave(phases.STEP)
            skipped = self.skipped_steps > before
            if skipped and not _overflows:
                notices.add("DeepSpeed skipped a step, as if its gradients had overflowed")
            _overflows = False
            loss_scaler.first_is_over()
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
