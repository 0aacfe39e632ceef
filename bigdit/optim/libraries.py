"""Optimizers of bitsandbytes, torchao and schedulefree, imported on use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from bigdit import libraries
from bigdit.errors import UserError
from bigdit.optim.groups import Groups
from bigdit.strategy import TORCHAO, OptimizerSpec


def bitsandbytes(spec: OptimizerSpec, params: Groups) -> Optimizer:
    """Block-wise 8-bit state (Dettmers et al., arXiv:2110.02861), in fp32 below 4096 elements.

    Paged state is CUDA managed memory, which the driver moves to CPU memory if the GPU is full. Its first step raises
    UserError for weights on the CPU.
    """
    with libraries.uncompiled():
        from bitsandbytes.optim import AdamW8bit, Lion8bit, PagedAdamW8bit, optimizer

    if spec.name == "lion_8bit":
        made = Lion8bit(params, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay)
    else:
        adamw = PagedAdamW8bit if spec.name == "paged_adamw_8bit" else AdamW8bit
        made = adamw(params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
    if spec.name == "paged_adamw_8bit":
        # Checked at the first step: DeepSpeed moves the weights after it gets the optimizer.
        made.register_step_pre_hook(_refuse_cpu)
    else:  # do not wait for the GPU after each tensor: only managed memory needs that
        made.step = _stepping_with(optimizer, "sync_gpu", lambda tensor: None, made.step)
    return made


def _refuse_cpu(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(param.device.type == "cpu" for group in optimizer.param_groups for param in group["params"]):
        raise UserError(
            "strategy.optimizer.name paged_adamw_8bit keeps its state in CUDA's managed memory, and the weights that "
            "it steps are on the CPU; use strategy.optimizer.name adamw_8bit"
        )


def schedulefree(spec: OptimizerSpec, params: Groups) -> Optimizer:
    """Schedule-free AdamW (Defazio et al., arXiv:2405.15682): it averages weights instead of lowering the rate.

    State: z and a second moment, 8 B per parameter. Temporaries: 4 B per element of one weight, or of all with foreach.
    """
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(
        params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, foreach=False
    )
    optimizer.train()
    return optimizer


def torchao(spec: OptimizerSpec, params: Groups, *, stochastic_rounding: bool) -> Optimizer:
    """AdamW with block-wise 8-bit or 4-bit state (Li et al., arXiv:2309.01507), or in the weights' own dtype.

    torchao would compile the step for each shape of weight, which takes minutes at each start, and makes memory unknown
    before. Here it runs uncompiled, tensor by tensor. Temporaries: 41 B per element of the largest weight, and 53 to
    57 B with 8 or 4 bits, whose codes are searched in int64.
    """
    from torchao.optim import AdamW4bit, AdamW8bit, subclass_4bit, subclass_8bit
    from torchao.optim.adam import _AdamW

    # torchao caches its maps: without this a process's first optimizer would allocate more than later ones.
    for maps in (subclass_4bit, subclass_8bit):
        maps.get_qmap_signed.cache_clear()
        maps.get_qmap_unsigned.cache_clear()

    adamw = {"adamw_8bit_ao": AdamW8bit, "adamw_4bit_ao": AdamW4bit}.get(spec.name, _AdamW)
    optimizer = adamw(
        params,
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        bf16_stochastic_round=stochastic_rounding,
    )
    if spec.name in TORCHAO:
        optimizer._subclass_zeros = functools.partial(_quantised_zeros, optimizer._subclass_zeros)
    # A call of a compiled update takes longer than the update itself, and a step calls it for each tensor.
    optimizer.step = _stepping_with(torch, "compile", lambda function, **options: function, optimizer.step)
    return optimizer


def _stepping_with(owner: Any, name: str, replaced: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, during which the function `name` of `owner` is `replaced`."""

    @functools.wraps(step)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        original = getattr(owner, name)
        setattr(owner, name, replaced)
        try:
            return step(*args, **kwargs)
        finally:
            setattr(owner, name, original)

    return stepping


def _quantised_zeros(zeros: Callable[..., torch.Tensor], p: torch.Tensor, *args: Any) -> torch.Tensor:
    # The dtype of quantised state is only nominal, and torchao's views lose it: for bf16 weights a DTensor of state
    # would be bf16, and its local part fp32. Here both are fp32, the dtype of the step.
    return zeros(SimpleNamespace(shape=p.shape, device=p.device, dtype=torch.float32), *args)
