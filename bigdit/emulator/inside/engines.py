"""Loss scaling and DeepSpeed engines: steps that are skipped, and the first step, which real GPUs skip.

The first scale of 65536 overflows in fp16 there. On an emulated GPU nothing overflows. So in a second run the first
step is made to overflow. Then no optimizer state exists until the step after it. An engine's steps are counted as its
own, whatever optimizers it drives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from . import imports, notices, parent, steps
from .imports import replacing

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
    _watch_scaler(torch.amp.GradScaler)
    imports.after("deepspeed.runtime.engine", _watch_engine)
    for module, (owner, names) in _CHECKS.items():
        imports.after(module, partial(_watch_checks, owner, names))


def _watch_scaler(scaler: Any) -> None:
    @replacing(scaler, "step")
    def step(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        global scales_loss
        scales_loss |= bool(self._enabled)
        return original(self, optimizer, *args, **kwargs)

    @replacing(scaler, "_unscale_grads_")
    def unscale(original: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if _first:
            for value in found.values():
                value.fill_(1.0)
        return found

    @replacing(scaler, "_maybe_opt_step")
    def opt_step(original: Any, self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        overflows = bool(sum(value.item() for value in optimizer_state["found_inf_per_device"].values()))
        result = original(self, optimizer, optimizer_state, *args, **kwargs)
        if overflows:
            steps.complete(optimizer, was_skipped=True)
            if not _first:
                notices.add("the loss scaler skipped a step, as if its gradients had overflowed")
        return result

    @replacing(scaler, "update")
    def update(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        global _first
        try:
            return original(self, *args, **kwargs)
        finally:
            _first = _first and not self._enabled


def _watch_engine(module: Any) -> None:
    @replacing(module.DeepSpeedEngine, "__init__")
    def start(original: Any, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed creates optimizer states by a step when it starts, which is no training step."""
        with steps.DrivenOptimizers():
            return original(*args, **kwargs)

    @replacing(module.DeepSpeedEngine, "backward")
    def backward(original: Any, *args: Any, **kwargs: Any) -> Any:
        steps.before_backward()
        steps.enter(steps.BACKWARD)
        try:
            return original(*args, **kwargs)
        finally:
            steps.leave(steps.BACKWARD)

    @replacing(module.DeepSpeedEngine, "step")
    def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
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


def _watch_checks(owner: str, names: tuple[str, ...], module: Any) -> None:
    for name in names:
        if hasattr(getattr(module, owner, None), name):

            @replacing(getattr(module, owner), name)
            def check(original: Any, *args: Any, **kwargs: Any) -> Any:
                found = original(*args, **kwargs)
                return True if _overflows else found
