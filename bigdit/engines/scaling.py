"""Whether a step may be taken, and dynamic loss scaling: small fp16 gradients are kept from vanishing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


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
