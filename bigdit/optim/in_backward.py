"""Optimizer steps inside the backward pass: each gradient is used where it appears, and freed.

Source: Lv et al., arXiv:2306.09782 (LOMO), §3.1: the gradients of all parameters never exist at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch.optim import Optimizer


def step_in_backward(
    optimizer: Optimizer,
    params: Iterable[torch.Tensor],
    masters: Iterable[torch.Tensor] | None = None,
    *,
    taken: Callable[[], bool],
) -> None:
    """Have `optimizer` step each of `params` as soon as its gradient is accumulated, with the lr set before.

    `masters`: the fp32 tensors that the optimizer updates, one a parameter, where they are not the parameters. `taken`:
    whether this pass is stepped; gradients are freed anyway.
    """
    params = list(params)
    for param, master in zip(params, params if masters is None else masters, strict=True):
        param.register_post_accumulate_grad_hook(functools.partial(_step_one, optimizer, master, taken))


def step_alone(optimizer: Optimizer, param: torch.Tensor) -> None:
    """Step `param` alone, whose gradient is there, with the settings of its group."""
    groups = optimizer.param_groups
    # By identity: tensors compare by their values. ZeRO-3 empties the groups between steps: the first one serves.
    own = next((group for group in groups if any(other is param for other in group["params"])), groups[0])
    optimizer.param_groups = [own | {"params": [param]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


@torch.no_grad()
def _step_one(optimizer: Optimizer, master: torch.Tensor, taken: Callable[[], bool], param: torch.Tensor) -> None:
    if not taken():
        param.grad = None
        return
    if param is not master:
        master.grad = param.grad.float()  # type: ignore[union-attr]  # it was accumulated just now
        param.grad = None
    step_alone(optimizer, master)
    master.grad = None
    if param is not master:
        param.copy_(master)
