"""Activation checkpointing of the first k of N blocks (Chen et al., arXiv:1604.06174)."""

from __future__ import annotations

import functools
from typing import Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from bigdit.errors import UserError
from bigdit.models.family import Family


def apply_checkpointing(model: nn.Module, family: Family, first: int | Literal["all"]) -> None:
    """Recompute the first `first` blocks in the backward pass; the others keep their activations.

    The block's `forward` is replaced, not the block: names of parameters, and the hooks that engines put on
    modules, stay as they are. Raises UserError where the model has fewer blocks.
    """
    blocks = family.blocks(model)
    if first == "all":
        first = len(blocks)
    if first > len(blocks):
        raise UserError(f"train.checkpointed_blocks is {first}, and the model has {len(blocks)} blocks")
    for block in blocks[:first]:
        # Nothing in a block draws random numbers (dropout is 0 in pre-training configs), so the RNG state,
        # whose copy would synchronise with the device, is not kept.
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
