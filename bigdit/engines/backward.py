"""From losses to gradients, and whether to step: for engines that leave gradients to torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bigdit.engines.protocol import Stepped
from bigdit.engines.scaling import LossScaler, are_finite, is_finite
from bigdit.strategy import Strategy


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
        loss = loss / self._strategy.grad_accum_steps
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
