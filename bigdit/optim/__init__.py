"""Optimizers by name, each built over the tensors that an engine hands it (parameters or fp32 masters)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from bigdit.spec import OptimizerSpec


def build(spec: OptimizerSpec, params: Iterable[torch.Tensor]) -> Optimizer:
    """The optimizer that `spec` names, over `params`."""
    if spec.name == "adamw_8bit":
        # bitsandbytes: block-wise 8-bit state (Dettmers et al., arXiv:2110.02861); imported late, it probes CUDA.
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
    # fused: one kernel, and no temporary of the size of the parameters as foreach needs.
    return torch.optim.AdamW(
        params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=True
    )


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Use `lr` in the coming step, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr
