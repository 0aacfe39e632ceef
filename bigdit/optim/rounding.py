"""The last line of an optimizer step: into fp32 weights, or into bf16 ones that have no fp32 masters."""

from __future__ import annotations

import torch

from bigdit.optim.shards import local


def descend(param: torch.Tensor, update: torch.Tensor, lr: float, decay: float, stochastic: bool) -> None:
    """param ← decay · param − lr · update, in place; fp32 `update` is used up.

    `stochastic`: bf16 weights are rounded up with the probability that makes the expectation exact, so that
    updates below half a bf16 step are not lost.
    """
    param = local(param)
    update = update.view(param.shape)
    if stochastic and param.dtype == torch.bfloat16:
        param.copy_(round_to_bf16_(update.mul_(-lr).add_(param, alpha=decay)))
        return
    if decay != 1:
        param.mul_(decay)
    param.add_(update, alpha=-lr)


def round_to_bf16_(values: torch.Tensor) -> torch.Tensor:
    """Each fp32 value to one of its two neighbours in bf16, in place, as likely as it is close to it."""
    # bf16 is the upper half of the bits. Added to the lower ones, uniform 16 bits carry with that probability.
    bits = values.view(torch.int32)
    noise = torch.randint(-(2**15), 2**15, bits.shape, dtype=torch.int16, device=bits.device)
    bits.add_(noise).add_(2**15).bitwise_and_(-(2**16))
    return values
