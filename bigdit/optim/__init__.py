"""Optimizers by name, each over the tensors that an engine hands it: parameters, or fp32 masters.

`engines` owns these tensors and their precision; the learning rate is `train/loop.py`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch.optim import Optimizer

from bigdit.optim import libraries
from bigdit.optim.adafactor import Adafactor
from bigdit.optim.came import Came
from bigdit.optim.groups import Groups, groups
from bigdit.strategy import BITSANDBYTES, TORCHAO, OptimizerSpec

__all__ = ["build", "groups", "set_lr", "step_alone", "step_in_backward"]


def build(spec: OptimizerSpec, params: Groups, *, stochastic_rounding: bool = False) -> Optimizer:
    """The optimizer that `spec` names, over `params` or `groups` of them.

    `stochastic_rounding`: `params` are bf16 without fp32 masters, and updates are rounded into them so that their
    expectation is exact. `spec.eps` is Adam's alone.
    """
    if spec.name in BITSANDBYTES:
        return libraries.bitsandbytes(spec, params)
    if spec.name in TORCHAO or (spec.name == "adamw" and stochastic_rounding):
        return libraries.torchao(spec, params, stochastic_rounding=stochastic_rounding)
    if spec.name == "adafactor":
        return Adafactor(params, lr=spec.lr, weight_decay=spec.weight_decay, stochastic_rounding=stochastic_rounding)
    if spec.name in ("came", "came_8bit"):
        return Came(
            params,
            lr=spec.lr,
            betas=(*spec.betas, spec.beta3),
            weight_decay=spec.weight_decay,
            eight_bit=spec.name == "came_8bit",
            stochastic_rounding=stochastic_rounding,
        )
    # fused: one kernel, and no temporary; foreach: one of the size of all parameters; a loop: two of the largest.
    return torch.optim.AdamW(
        params,
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=spec.implementation == "fused",
        foreach=spec.implementation == "foreach",
    )


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Use `lr` in the next step, for all parameters."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def step_in_backward(
    optimizer: Optimizer,
    params: Iterable[torch.Tensor],
    masters: Iterable[torch.Tensor] | None = None,
    *,
    taken: Callable[[], bool],
) -> None:
    """Have `optimizer` step each of `params` as soon as its gradient is accumulated, with the lr set before.

    Source: Lv et al., arXiv:2306.09782 (LOMO), §3.1: the gradients of all parameters never exist at once.

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
