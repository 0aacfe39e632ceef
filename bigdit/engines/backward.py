"""From losses to gradients: dynamic loss scaling, clipping, and whether a step is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bigdit.strategy import Strategy


@dataclass(frozen=True)
class Stepped:
    """`taken`: whether weights and state changed; `grad_norm`: before clipping, where the strategy clips."""

    taken: bool
    grad_norm: torch.Tensor | None = None


def is_finite(number: torch.Tensor) -> bool:
    """Whether a number on the device is finite. Waits for the device.

    The test is inverted: an emulated GPU reads every value as False, and nothing overflows there.
    """
    return not bool(torch.isfinite(number).logical_not())


def are_finite(losses: Sequence[torch.Tensor], *, together: bool) -> bool:
    """Whether the losses are finite; `together`: of all processes, which all call this, and send one number each."""
    total = torch.stack([loss.detach() for loss in losses]).sum()
    if together and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return is_finite(total)


INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000


class LossScaler:
    """The factor of the loss: doubled after 2000 steps without an overflow, halved at each.

    Source: Micikevicius et al., arXiv:1710.03740, §3.2; the constants are those of torch.amp.GradScaler, which needs
    all gradients of an optimizer at once, in fp32.
    """

    def __init__(self) -> None:
        self.scale = INITIAL_SCALE
        self._steps_since = 0

    def overflowed(self, norm: torch.Tensor) -> bool:
        """Whether the scaled gradients, whose norm is `norm`, have an infinity or NaN: then skip this step.

        Adapts `scale` for the coming steps. All processes must pass the norm of all gradients.
        """
        if not is_finite(norm):
            self.scale, self._steps_since = self.scale / 2, 0
            return True
        self._steps_since += 1
        if self._steps_since == GROWTH_INTERVAL:
            self.scale, self._steps_since = self.scale * 2, 0
        return False

    def state_dict(self) -> dict[str, float]:
        """The state for `load_state_dict`, by the names of torch.amp.GradScaler."""
        return {"scale": self.scale, "_growth_tracker": self._steps_since}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""
        self.scale, self._steps_since = float(state["scale"]), int(state["_growth_tracker"])


class Backward:
    """The backward passes of a step, and whether it is taken: alike for every engine that leaves gradients to torch.

    fp16 scales the loss dynamically. `together`: all processes take a step, or none. `taken`: with
    optimizer_in_backward, whether the current pass is stepped.
    """

    def __init__(self, strategy: Strategy, *, together: bool) -> None:
        self._strategy = strategy
        self._together = together
        self.scaler = LossScaler() if strategy.precision == "fp16" else None
        self.taken = True

    def run(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's share of the mean gradient, scaled as the loss is."""
        if self._strategy.optimizer_in_backward:
            self.taken = are_finite([loss], together=self._together)
        # Gradients are averaged over all processes. Those of a sample's tokens are to be summed.
        loss = loss / (self._strategy.grad_accum_steps / self._strategy.cp)
        (loss if self.scaler is None else loss * self.scaler.scale).backward()

    def judge(
        self, losses: Sequence[torch.Tensor], norm_of_all: Callable[[], torch.Tensor]
    ) -> tuple[Stepped, torch.Tensor | float | None]:
        """Whether to step, and the factor of the gradients, which unscales and clips; None: they stay as they are.

        `norm_of_all`: the norm of the present gradients over all processes; called only where it is needed.
        """
        limit, scaler = self._strategy.gradient_clipping, self.scaler
        if limit is None and scaler is None:
            return Stepped(are_finite(losses, together=self._together)), None
        factor: torch.Tensor | float = 1.0 if scaler is None else 1.0 / scaler.scale
        norm = norm_of_all() * factor
        taken = is_finite(norm) if scaler is None else not scaler.overflowed(norm)
        if limit is None:
            return Stepped(taken), factor
        return Stepped(taken, norm), factor * (limit / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ has it
