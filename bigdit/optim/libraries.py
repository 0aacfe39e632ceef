"""Optimizers of bitsandbytes and torchao, imported when they are chosen."""

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

    Paged state is CUDA managed memory, which the driver moves to CPU memory when the GPU is full. With weights on the
    CPU its first step raises UserError.
    """
    with libraries.uncompiled():
        from bitsandbytes.optim import AdamW8bit, Lion8bit, PagedAdamW8bit, optimizer

    if spec.name == "lion_8bit":
        made = Lion8bit(params, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay)
    else:
        adamw = PagedAdamW8bit if spec.name == "paged_adamw_8bit" else AdamW8bit
        made = adamw(params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
    if spec.name == "paged_adamw_8bit":
        # Not before: DeepSpeed moves the weights after it gets the optimizer.
        made.register_step_pre_hook(_refuse_cpu)
    else:  # it waits for the GPU after each tensor, which only managed memory needs
        made.step = _stepping_with(optimizer, "sync_gpu", lambda tensor: None, made.step)
    return made


def _refuse_cpu(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(param.device.type == "cpu" for group in optimizer.param_groups for param in group["params"]):
        raise UserError(
            "strategy.optimizer.name paged_adamw_8bit keeps its state in CUDA's managed memory, and the weights that "
            "it steps are on the CPU; use strategy.optimizer.name adamw_8bit"
        )


def torchao(spec: OptimizerSpec, params: Groups, *, stochastic_rounding: bool) -> Optimizer:
    """AdamW with block-wise 8-bit or 4-bit state (Li et al., arXiv:2309.01507), or in the weights' own dtype.

    torchao compiles the step for every shape of weight. Here it runs uncompiled, tensor by tensor. A compiler's
    allocations are known only once it has run, which takes minutes at each start. Temporaries: 41 B an element of the
    largest weight, and 53 to 57 B with 8 or 4 bits, whose codes are searched in int64.
    """
    from torchao.optim import AdamW4bit, AdamW8bit, subclass_4bit, subclass_8bit
    from torchao.optim.adam import _AdamW

    # Tensor operations make its maps at first use, and it keeps them: a process's first optimizer would allocate more
    # than others, and an attempt more than the run.
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
    # Each call of a compiled update takes longer than the update, and a step calls it for every tensor.
    optimizer.step = _stepping_with(torch, "compile", lambda function, **options: function, optimizer.step)
    return optimizer


def _stepping_with(owner: Any, name: str, replaced: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, within which that function of `owner` is replaced."""

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
    # The dtype of quantised state is nominal, and torchao's views lose it: a DTensor of bf16 weights' state would be
    # bf16, and its local part fp32. Here both are fp32, in which the step computes.
    return zeros(SimpleNamespace(shape=p.shape, device=p.device, dtype=torch.float32), *args)
