"""Activation checkpointing of the first k of N blocks, of all they compute or of the cheap part of it.

Source: Chen et al., arXiv:1604.06174 (checkpointing); Korthikanti et al., arXiv:2205.05198 (selective).
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bigdit.errors import UserError
from bigdit.models.family import Family
from bigdit.units import how_many

aten = torch.ops.aten

# What costs most to compute for each byte that it takes to keep: matrix products and attention. A CPU, CUDA's
# three kernels and torch's mathematical form (bmm) each have an operator of their own.
KEPT = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def apply_checkpointing(
    model: nn.Module, family: Family, first: int | Literal["all"], kind: Literal["full", "selective"] = "full"
) -> None:
    """Recompute the first `first` blocks in the backward pass; the others keep their activations.

    `selective` blocks keep the outputs of matrix products, convolutions and attention, and recompute the rest.
    The block's `forward` is replaced, not the block: names of parameters, and the hooks that engines put on
    modules, stay as they are. Raises UserError where the model has fewer blocks.
    """
    blocks = family.blocks(model)
    if first == "all":
        first = len(blocks)
    if first > len(blocks):
        raise UserError(f"train.checkpointed_blocks is {first}, and the model has {how_many(len(blocks), 'block')}")
    # Nothing in a block draws random numbers (dropout is 0 in pre-training configs), so the RNG state,
    # whose copy would synchronise with the device, is not kept.
    run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if kind == "selective":
        run = functools.partial(run, context_fn=functools.partial(create_selective_checkpoint_contexts, _kept()))
    for block in blocks[:first]:
        block.forward = functools.partial(run, block.forward)


def _kept() -> list[torch._ops.OpOverload]:
    """The operators whose outputs are kept; that of an nf4 base is there once bitsandbytes is imported."""
    nf4 = getattr(torch.ops.bitsandbytes, "gemm_4bit", None)
    return [*KEPT, *(() if nf4 is None else (nf4.default,))]
