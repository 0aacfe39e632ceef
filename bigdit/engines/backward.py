"""Backward passes: dynamic loss scaling, clipping, and whether a step is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bigdit.strategy import Strategy


@dataclass(frozen=True)
class StepOutcome:
    """`taken`: whether weights and state changed; `grad_norm`: before clipping, None without clipping."""

    taken: bool
    grad_norm: torch.Tensor | None = None


def is_finite(number: torch.Tensor) -> bool:
    """Whether a number on the device is finite. Waits for the device.

    Inverted, because an emulated GPU reads every value as False, and must report finite numbers.
    """
    return not bool(torch.isfinite(number).logical_not())


def are_finite(losses: Sequence[torch.Tensor], *, together: bool) -> bool:
    """Whether the losses are finite; `together`: those of all processes, which all call this."""
    total = torch.stack([loss.detach() for loss in losses]).sum()
    if together and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return is_finite(total)


INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000


class LossScaler:
    """The factor of the loss: doubled after 2000 steps without overflow, halved at each overflow.

    Source: Micikevicius et al., arXiv:1710.03740, §3.2, with the constants of torch.amp.GradScaler. That class needs
    all gradients of an optimizer at once, in fp32.
    """

    def __init__(self) -> None:
        self.scale = INITIAL_SCALE
        self._steps_since = 0

    def overflowed(self, norm: torch.Tensor) -> bool:
        """Whether the norm of the scaled gradients is infinite or NaN, so that the step must be skipped.

        Adapts `scale` for the next steps. All processes must pass the norm of all gradients.
        """
        if not is_finite(norm):
            self.scale, self._steps_since = self.scale / 2, 0
            return True
        self._steps_since += 1
        if self._steps_since == GROWTH_INTERVAL:
            self.scale, self._steps_since = self.scale * 2, 0
        return False

    def state_dict(self) -> dict[str, float]:
        """The state, with the names of torch.amp.GradScaler."""
        return {"scale": self.scale, "_growth_tracker": self._steps_since}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""
        self.scale, self._steps_since = float(state["scale"]), int(state["_growth_tracker"])


class Backward:
    """The backward passes of a step, and whether it is taken, for engines whose gradients torch computes.

    With fp16 it scales the loss dynamically. `together`: all processes take a step, or none. `taken`: with
    optimizer_in_backward, whether the current pass updates weights.
    """

    def __init__(self, strategy: Strategy, *, together: bool) -> None:
        self._strategy = strategy
        self._together = together
        self.scaler = LossScaler() if strategy.precision == "fp16" else None
        self.taken = True

    def run(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's share of the mean gradient, scaled like the loss."""
        if self._strategy.optimizer_in_backward:
            self.taken = are_finite([loss], together=self._together)
        # Gradients are averaged over all processes; those of one sample's tokens must be summed.
        loss = loss / (self._strategy.grad_accum_steps / self._strategy.cp)
        (loss if self.scaler is None else loss * self.scaler.scale).backward()

    def decide(
        self, losses: Sequence[torch.Tensor], norm_of_all: Callable[[], torch.Tensor]
    ) -> tuple[StepOutcome, torch.Tensor | float | None]:
        """Whether to step, and the factor that unscales and clips gradients; None if they need no factor.

        `norm_of_all`: computes the norm of the current gradients over all processes; called only if needed.
        """
        limit, scaler = self._strategy.gradient_clipping, self.scaler
        if limit is None and scaler is None:
            return StepOutcome(are_finite(losses, together=self._together)), None
        factor: torch.Tensor | float = 1.0 if scaler is None else 1.0 / scaler.scale
        norm = norm_of_all() * factor
        taken = is_finite(norm) if scaler is None else not scaler.overflowed(norm)
        if limit is None:
            return StepOutcome(taken), factor
        return StepOutcome(taken, norm), factor * (limit / (norm + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
