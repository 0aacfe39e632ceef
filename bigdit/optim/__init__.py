"""Optimizers by name, for the tensors of an engine: parameters, or fp32 masters.

Engines own these tensors and their precision; `train/loop.py` sets the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import assert_never

import torch
from torch.optim import Optimizer

from bigdit.errors import UserError
from bigdit.optim import libraries
from bigdit.optim.adafactor import Adafactor
from bigdit.optim.came import Came
from bigdit.optim.groups import LR_FACTOR, Groups, groups
from bigdit.optim.muon import Muon
from bigdit.strategy import OptimizerSpec

_GROUP_STATE = ("k", "weight_sum", "lr_max", "d", "d_max", "d_numerator")
"""State of schedule-free and Prodigy that is equal in all groups: steps, sums of weights of the average, the
estimate."""


def build(spec: OptimizerSpec, params: Groups, *, stochastic_rounding: bool = False) -> Optimizer:
    """The optimizer that `spec` names, over `params` or `groups` of them.

    `stochastic_rounding`: `params` are bf16 without fp32 masters, and updates are rounded so that their expectation is
    exact. Only Adam uses `spec.eps`.
    """
    if spec.missing_package is not None:
        raise UserError(f"strategy.optimizer.name: {spec.missing_package}")
    match spec.name:
        case "adamw" if not stochastic_rounding:
            # Temporaries: none with fused, one of all parameters with foreach, two of the largest one with a loop.
            return torch.optim.AdamW(
                params,
                lr=spec.lr,
                betas=spec.betas,
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                fused=spec.implementation == "fused",
                foreach=spec.implementation == "foreach",
            )
        case "adamw" | "adamw_8bit_ao" | "adamw_4bit_ao":
            return libraries.torchao(spec, params, stochastic_rounding=stochastic_rounding)
        case "adamw_8bit" | "paged_adamw_8bit" | "lion_8bit":
            return libraries.bitsandbytes(spec, params)
        case "muon":
            return Muon(params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
        case "prodigy":
            from bigdit.optim.prodigy import Prodigy

            return Prodigy(spec, params)
        case "adamw_schedulefree":
            return libraries.schedulefree(spec, params)
        case "adafactor":
            return Adafactor(
                params, lr=spec.lr, weight_decay=spec.weight_decay, stochastic_rounding=stochastic_rounding
            )
        case "came" | "came_8bit":
            return Came(
                params,
                lr=spec.lr,
                betas=(*spec.betas, spec.beta3),
                weight_decay=spec.weight_decay,
                eight_bit=spec.name == "came_8bit",
                stochastic_rounding=stochastic_rounding,
            )
        case _:
            assert_never(spec.name)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Use `lr` in the next step, times the factor of a group that has one."""
    for group in optimizer.param_groups:
        own = lr * group.get(LR_FACTOR, 1.0)
        if isinstance(group["lr"], torch.Tensor):  # torchao's
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def effective_lr(optimizer: Optimizer, lr: float) -> float:
    """The rate of the weights: `lr`, which Prodigy multiplies by its estimate d."""
    return float(optimizer.param_groups[0].get("d", 1.0)) * lr


def group_state(optimizer: Optimizer) -> dict[str, float]:
    """An optimizer's state for all parameters together, by name."""
    first = optimizer.param_groups[0]
    return {key: first[key] for key in _GROUP_STATE if key in first}


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[bool]:
    """Within the block the weights are schedule-free's average; afterwards they are restored exactly.

    Yields whether they change: other optimizers have no average. The package's own way to restore them rounds. The
    copies need as much memory as the gradients did in the step.
    """
    if not hasattr(optimizer, "eval"):
        yield False
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    trained = [param.detach().clone() for param in params]
    optimizer.eval()
    try:
        yield True
    finally:
        optimizer.train()
        with torch.no_grad():
            for param, kept in zip(params, trained, strict=True):
                param.copy_(kept)


def make_state(optimizer: Optimizer, param: torch.Tensor) -> None:
    """Allocate the state of `param`, by a step on a zero gradient unless the optimizer has a method for it: with some
    optimizers a step communicates with all processes."""
    if hasattr(optimizer, "start") and optimizer.start(param):
        return
    held = param.grad  # with offload DeepSpeed keeps this tensor, and views of it
    param.grad = torch.zeros_like(param)
    step_alone(optimizer, param)
    param.grad = held


def step_in_backward(
    optimizer: Optimizer,
    params: Iterable[torch.Tensor],
    masters: Iterable[torch.Tensor] | None = None,
    *,
    taken: Callable[[], bool],
) -> None:
    """Make `optimizer` step each of `params` as soon as its gradient is accumulated, with the lr that is set.

    Source: Lv et al., arXiv:2306.09782 (LOMO), §3.1: the gradients of all parameters never exist at once.

    `masters`: the fp32 tensors that the optimizer updates, one per parameter, if they are not the parameters. `taken`:
    returns whether this pass is stepped; gradients are freed anyway.
    """
    params = list(params)
    for param, master in zip(params, params if masters is None else masters, strict=True):
        param.register_post_accumulate_grad_hook(partial(_step_one, optimizer, master, taken))


def step_alone(optimizer: Optimizer, param: torch.Tensor) -> None:
    """Step `param` alone, which has a gradient, with the settings of its group."""
    before = optimizer.param_groups
    # By identity: tensors compare by their values. ZeRO-3 empties the groups between steps: then the first is used.
    own = next((group for group in before[1:] if any(map(partial(is_, param), group["params"]))), before[0])
    optimizer.param_groups = [own | {"params": [param]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = before


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
