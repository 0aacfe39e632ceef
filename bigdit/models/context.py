"""Context parallelism by Ulysses (Jacobs et al., arXiv:2309.14509): each process has a part of a sample's tokens.

Before attention, processes exchange tokens for heads: each has all tokens of some heads. Afterwards they exchange back.
A process's gradient is that of its own tokens. The gradients of a sample are their sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bigdit.catalog.context import CONTEXTS
from bigdit.models.family import Family

ACROSS = "attn2"
"""diffusers' name of attention to the text alone, whose keys each process has."""


def split_context(model: nn.Module, family: Family, mesh: DeviceMesh) -> None:
    """Have the model split its tokens over the processes of a one-dimensional `mesh`, and return whole predictions.

    Apply it after all that `equip` does, and before an engine takes the model.
    """
    context = CONTEXTS[family.CLASS_NAME]
    plan: dict[str, Any] = {
        module: {at: ContextParallelInput(split_dim=dim, split_output=isinstance(at, int)) for at, dim in of.items()}
        for module, of in context.splits.items()
    }
    plan[context.gathers] = ContextParallelOutput(gather_dim=1)
    split = SimpleNamespace(_mesh=mesh, _flattened_mesh=mesh, ulysses_anything=False, ring_anything=False)
    apply_context_parallel(model, split, plan)  # type: ignore[arg-type]
    for block in family.blocks(model):
        for name, module in block.named_modules():
            if hasattr(module, "processor") and name != ACROSS:
                module.forward = functools.partial(_exchanging, mesh.get_group(), module.forward)


def _exchanging(group: dist.ProcessGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Ulysses(group):
        return forward(*args, **kwargs)


class _Ulysses(TorchFunctionMode):
    """Within it, attention is of all tokens of the group, with a share of the heads on each process."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """As scaled_dot_product_attention, on [B, heads, tokens, D]; the mask [B, 1, 1, tokens] is of keys alone."""
        query, key, value = (_Exchange.apply(each, self._group, _HEADS, _TOKENS) for each in (query, key, value))
        mask = None if attn_mask is None else _gathered(attn_mask, self._group)
        attended = F.scaled_dot_product_attention(query, key, value, mask, **options)
        shared: torch.Tensor = _Exchange.apply(attended, self._group, _TOKENS, _HEADS)
        return shared


_TOKENS, _HEADS = 1, 2  # of [B, tokens, heads, D], as diffusers' classes have it in memory


class _Exchange(torch.autograd.Function):
    """Cut [B, heads, tokens, D] along one dimension, send a part to each process, and join along another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> torch.Tensor:
        ctx.of = group, joined, cut
        return _exchanged(tensor, group, cut, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], *ctx.of), None, None, None


def _exchanged(tensor: torch.Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> torch.Tensor:
    sent = torch.stack(tensor.transpose(1, 2).chunk(group.size(), cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    del sent
    return torch.cat(received.unbind(), joined).transpose(1, 2)


def _gathered(mask: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The mask of all keys, in the order of the processes."""
    parts = [torch.empty_like(mask) for _ in range(group.size())]
    dist.all_gather(parts, mask.contiguous(), group=group)
    return torch.cat(parts, -1)
