"""What the backward passes of attention take beside the gradients."""

from __future__ import annotations

from typing import Any

import torch

from bigdit.rehearse.scratch.launch import Launch, Rule, up

aten = torch.ops.aten


def _flash_backward(launch: Launch, grad_out: torch.Tensor, query: torch.Tensor, *rest: Any) -> None:
    """fp32: softmax_d [B, H, L'] and dq_accum [B, L', H, D'], L' in 128s, D' in 32s up to 192 and then 256.

    Source: mha_bwd in third_party/flash-attention/csrc/flash_attn/flash_api.cpp.
    """
    batch, heads, tokens, dim = query.shape
    tokens = up(tokens, 128)
    dim = up(dim, 32) if dim <= 192 else 256
    launch.results()
    launch.briefly(4 * batch * heads * tokens, 4 * batch * tokens * heads * dim)


RULES: dict[Any, Rule] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
}
