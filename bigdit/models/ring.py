"""Ring attention: keys and values of several processes go round (Liu et al., arXiv:2310.01889)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

aten = torch.ops.aten


class Ring(torch.autograd.Function):
    """Attention of [B, heads, tokens, D] to the keys of all processes of a group, block by block. While one block is
    computed, the next comes from the previous process. Parts are merged by the log of their sums of exponentials.

    `moving`: the first of the keys that go round, and their number; the others are text, which each process has.
    `mask`: for its own keys; `masks`: for those of each process. Both are added to scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        masks: torch.Tensor | None,
        moving: tuple[int, int],
        scale: float | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.of = of = _flash(query, mask), scale
        ctx.ring = moving, group
        coming = _passed(torch.stack([key, value]).narrow(3, *moving), group)
        attended, sums, *state = _attended(*of, query, key, value, mask)
        merged = attended.to(sums.dtype)
        for i in range(1, group.size()):
            block = coming()
            if i + 1 < group.size():
                coming = _passed(block, group)
            attended, more, *_ = _attended(*of, query, block[0], block[1], _mask_of_block(masks, i, group))
            share = torch.sigmoid(more - sums)[..., : query.shape[2], None]
            merged, sums = merged.lerp(attended.to(sums.dtype), share), torch.logaddexp(sums, more)
        found = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, masks, found, sums, *state)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (moving, group), (query, key, value, mask, masks, *found) = ctx.ring, ctx.saved_tensors
        given = *ctx.of, gradients[0], query
        coming = _passed(torch.stack([key, value]).narrow(3, *moving), group)
        of_query, *of_own = _gradients(*given, key, value, mask, *found)
        own = torch.stack(of_own)
        returning = _passed(own.narrow(3, *moving), group)  # a block's gradients go on with it, and come home last
        for i in range(1, group.size()):
            block = coming()
            if i + 1 < group.size():
                coming = _passed(block, group)
            more, *of_block = _gradients(*given, block[0], block[1], _mask_of_block(masks, i, group), *found)
            of_query = of_query + more
            returning = _passed(returning() + torch.stack(of_block), group)
        own.narrow(3, *moving).copy_(returning())
        return of_query, own[0], own[1], None, None, None, None, None


def _passed(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Send a tensor to the next process, and return a function that waits for the previous process's tensor.

    torch's compiler knows all_to_all, and no single sends. With one partner it is a send and a receive.
    Source: torch/csrc/cuda/nccl.cpp, and gloo.
    """
    sent, (rank, size) = tensor.contiguous(), (group.rank(), group.size())
    received = torch.empty_like(sent)
    after, before = ([len(sent) * (each == (rank + step) % size) for each in range(size)] for step in (1, -1))
    work = dist.all_to_all_single(
        received, sent, before, after, group=group, async_op=not torch.compiler.is_compiling()
    )

    def arrived() -> torch.Tensor:
        if work is not None:
            work.wait()
        return received

    return arrived


def _mask_of_block(masks: torch.Tensor | None, i: int, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The mask of the block that comes after `i` passes."""
    return None if masks is None else masks[(group.rank() - i) % group.size()]


def _flash(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether to use CUDA's flash kernel, for half precision from Ampere on without a mask. All blocks of a ring need
    the same kernel, because kernels return sums in different shapes."""
    cuda = query.device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    return cuda and mask is None and query.dtype != torch.float32


def _attended(
    flash: bool,
    scale: float | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Attention, the log of each query's sum of exponentials, and the random state of CUDA's kernels."""
    given = query, key, value
    if flash:
        found = aten._scaled_dot_product_flash_attention(*given, scale=scale)
        return found[0], found[1], found[6], found[7]
    if query.device.type == "cpu":
        return (*aten._scaled_dot_product_flash_attention_for_cpu(*given, attn_mask=mask, scale=scale),)
    return (*aten._scaled_dot_product_efficient_attention(*given, _bias(query, key, mask), True, scale=scale),)


def _gradients(
    flash: bool,
    scale: float | None,
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    attended: torch.Tensor,
    sums: torch.Tensor,
    *state: torch.Tensor,
) -> tuple[Any, ...]:
    """The gradients of query, key and value. `attended` and `sums` are those of all blocks."""
    given = gradient, query, key, value
    if flash:
        backward, tokens = aten._scaled_dot_product_flash_attention_backward, (query.shape[2], key.shape[2])
        return (*backward(*given, attended, sums, None, None, *tokens, 0.0, False, *state, scale=scale),)
    if query.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return (*backward(*given, attended, sums, 0.0, False, attn_mask=mask, scale=scale),)
    backward, bias = aten._scaled_dot_product_efficient_attention_backward, _bias(query, key, mask)
    return backward(*given, bias, attended, sums, *state, 0.0, [True, True, True, False], scale=scale)[:3]


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask for CUDA's kernel: for each query, with aligned rows."""
    if mask is None:
        return None
    keys = key.shape[2]
    return F.pad(mask, (0, -keys % 16))[..., :keys].expand(*query.shape[:3], keys)
