"""Whether a step may be taken: its gradients are finite, or, where no norm of them is known, its losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def is_finite(number: torch.Tensor) -> bool:
    """Whether a number on the device is finite. Waits for the device.

    Asked by its contrary: what is read of an emulated GPU is False, and there nothing overflows.
    """
    return not bool(torch.isfinite(number).logical_not())


def are_finite(losses: Sequence[torch.Tensor], *, together: bool) -> bool:
    """Whether the losses are finite; `together`: of all processes, which all call this, and send one number each."""
    total = torch.stack([loss.detach() for loss in losses]).sum()
    if together and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return is_finite(total)
