"""Context parallelism: each process has a part of a sample's tokens.

Ulysses (Jacobs et al., arXiv:2309.14509): before attention, processes exchange tokens for heads, so each has all tokens
of some heads. Afterwards they exchange back. Rings (Liu et al., arXiv:2310.01889): blocks of keys and values go round,
and each process attends to one after another. With both, neighbours exchange heads, and their tokens together are a
block (USP, Fang and Zhao, arXiv:2405.07719).
A process has the gradient of its own tokens. The gradient of a sample is the sum over processes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bigdit.catalog.context import CONTEXTS
from bigdit.catalog.families import FAMILIES
from bigdit.errors import UserError
from bigdit.models.family import Family
from bigdit.models.ring import Ring


def split_context(model: nn.Module, family: Family, mesh: DeviceMesh) -> None:
    """Make the model split its tokens over the processes of a `mesh`, and return whole predictions.

    The mesh has the dimensions `ring`, `ulysses`, or both in this order. Call it after `equip`, before an engine takes
    the model. Raises UserError if diffusers uses other attention than torch's: each process would attend only to its
    own tokens.
    """
    if not DIFFUSERS_ATTN_BACKEND.removeprefix("_").startswith("native"):
        raise UserError(
            f"DIFFUSERS_ATTN_BACKEND is {DIFFUSERS_ATTN_BACKEND}, and strategy.cp shares torch's own attention alone; "
            "unset it, or set strategy.cp to 1"
        )
    whole = mesh if mesh.ndim == 1 else mesh._flatten()
    context, group = CONTEXTS[family.CLASS_NAME], whole.get_group()
    plan: dict[str, Any] = {
        module: {at: _part(dim, split_output=isinstance(at, int)) for at, dim in of.items()}
        for module, of in context.splits.items()
    }
    plan[context.gathers] = ContextParallelOutput(gather_dim=1)
    split = SimpleNamespace(_mesh=mesh, _flattened_mesh=whole, ulysses_anything=False, ring_anything=False)
    apply_context_parallel(model, split, plan)  # type: ignore[arg-type]
    if FAMILIES[family.CLASS_NAME].keeps_first:
        model.register_forward_pre_hook(functools.partial(_own_times, group), with_kwargs=True)
    mode: Callable[[int], TorchFunctionMode] = functools.partial(_SummedAttention, group)
    if not context.linear:
        groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
        mode = functools.partial(_SharedAttention, groups, context.text)
    surrounded = functools.cache(_surrounded)
    for block in family.blocks(model):
        for name, module in block.named_modules():
            if hasattr(module, "processor") and name != context.across:
                module.forward = types.MethodType(surrounded(_in_mode, mode, type(module).forward), module)
        if context.linear:
            block.forward = functools.partial(_with_rows, group.size(), block.forward)
            depthwise = block.ff.conv_depth
            depthwise.forward = types.MethodType(
                surrounded(_with_neighbours, group, type(depthwise).forward), depthwise
            )


def _part(dim: int | tuple[int, int], *, split_output: bool) -> Any:
    if isinstance(dim, tuple):
        return [_part(each, split_output=split_output) for each in dim]
    return ContextParallelInput(split_dim=dim, split_output=split_output)


def _own_times(
    group: dist.ProcessGroup, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a model; if each token has a t, [B, tokens], only those of this process."""
    if (times := kwargs["timestep"]).dim() == 2:
        kwargs = {**kwargs, "timestep": times.chunk(group.size(), 1)[group.rank()]}
    return args, kwargs


def _surrounded(around: Callable[..., Any], given: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """A class's own forward within `around`. All its modules share it: for each that has its own, torch would compile
    the block again."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(given, functools.partial(own, module), *args, **kwargs)

    return forward


def _in_mode(mode: Callable[[int], TorchFunctionMode], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an attention within a mode, which gets the number of text tokens."""
    text = kwargs.get("encoder_hidden_states")
    with mode(0 if text is None else text.shape[1]):
        return forward(*args, **kwargs)


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function, as a method if it is one of a tensor: within a mode, torch 2.13 cannot compile some methods as
    functions, such as `unflatten` and replaced ones."""
    name = func.__name__
    if getattr(torch.Tensor, name, None) is func:
        return getattr(args[0], name)(*args[1:], **(kwargs or {}))
    return func(*args, **(kwargs or {}))


class _SharedAttention(TorchFunctionMode):
    """A mode in which attention sees all tokens of the groups.

    In the group `ulysses` each process has a share of the heads; in `ring` it sees one share of the keys after another.
    `place`: where the `text` tokens are, which each process has whole; None if they are split.
    """

    def __init__(self, groups: dict[str, dist.ProcessGroup], place: str | None, text: int) -> None:
        super().__init__()
        self._group, self._ring = groups.get("ulysses"), groups.get("ring")
        self._text, self._first = text if place else 0, place == "first"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return _call(func, args, kwargs)
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """scaled_dot_product_attention of [B, heads, tokens, D]. The mask is [B, 1, 1, tokens] for keys. One for
        queries too, [B, 1, tokens, tokens], is reduced to keys: results for hidden text are not used."""
        mask = self._key_mask(attn_mask) if self._text and attn_mask is not None else attn_mask
        if self._group is None:
            return self._attend_heads(query, key, value, mask, **options)
        if not self._text:
            query, key, value = (_Exchange.apply(each, self._group, _HEADS, _TOKENS) for each in (query, key, value))
            mask = None if mask is None else _gathered(mask, self._group)
            attended = self._attend_heads(query, key, value, mask, **options)
            shared: torch.Tensor = _Exchange.apply(attended, self._group, _TOKENS, _HEADS)
            return shared
        query, key, value = (self._own_heads(each, self._group) for each in (query, key, value))
        return self._own_tokens(self._attend_heads(query, key, value, mask, **options), self._group)

    def _attend_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Attention of this process's heads to the keys of the ring."""
        if self._ring is None:
            return F.scaled_dot_product_attention(query, key, value, mask, **options)
        scale = options.pop("scale", None)
        if any(options.values()):
            raise NotImplementedError(f"attention with {options} does not go round")
        masks = None
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
            masks = None if self._text else torch.stack(_gathered(mask, self._ring).chunk(self._ring.size(), -1))
        moving = (self._text if self._first else 0, key.shape[2] - self._text)
        attended: torch.Tensor = Ring.apply(query, key, value, mask, masks, moving, scale, self._ring)
        return attended

    def _split_text(self, tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The text tokens, and the others."""
        others = tensor.shape[dim] - self._text
        if self._first:
            text, image = tensor.split((self._text, others), dim)
        else:
            image, text = tensor.split((others, self._text), dim)
        return text, image

    def _joined(self, text: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (text, image) if self._first else (image, text)

    def _own_heads(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """All tokens of this process's heads, from its own tokens of all heads."""
        text, image = self._split_text(tensor, 2)
        own = text.chunk(group.size(), 1)[group.rank()]
        return torch.cat(self._joined(own, _Exchange.apply(image, group, _HEADS, _TOKENS)), 2)

    def _own_tokens(self, attended: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The inverse. Each process gets the whole text."""
        text, image = self._split_text(attended, 2)
        pieces = [each for part in image.chunk(group.size(), 2) for each in self._joined(text, part)]
        shared: torch.Tensor = _Exchange.apply(torch.cat(pieces, 2), group, _TOKENS, _HEADS)
        return shared

    def _key_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """The mask [B, 1, 1, tokens] of this process's keys after Ulysses: image tokens are not masked."""
        text, image = self._split_text(self._split_text(mask, 2)[1][:, :, :1], 3)
        return torch.cat(self._joined(text, image.repeat(1, 1, 1, 1 if self._group is None else self._group.size())), 3)


class _SummedAttention(TorchFunctionMode):
    """A mode in which linear attention sees all tokens of the group: its first product is summed over processes."""

    def __init__(self, group: dist.ProcessGroup, text: int) -> None:
        super().__init__()
        self._group, self._over = group, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _call(func, args, kwargs)
        if func is not torch.matmul or self._over:
            return found
        self._over = True
        return _Sum.apply(found, self._group)


class _Sum(torch.autograd.Function):
    """The sum of the processes' tensors, on each."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _Sum._of(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum._of(gradients[0], ctx.group), None

    @staticmethod
    def _of(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed


def _with_rows(parts: int, forward: Callable[..., Any], *args: Any) -> Any:
    """Call a block of Sana with the height of this process's part."""
    *others, height, width = args
    return forward(*others, height // parts, width)


def _with_neighbours(group: dist.ProcessGroup, forward: Callable[..., Any], rows: torch.Tensor) -> Any:
    """Call a 3 × 3 convolution on rows [B, C, rows, W], with the neighbouring rows of other processes."""
    return forward(_WithBorders.apply(rows, group))[:, :, 1:-1]


class _WithBorders(torch.autograd.Function):
    """Rows with the last row of the previous process above and the first row of the next below; zeros at both ends."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        above, below = _borders(rows[:, :, -1], rows[:, :, 0], group)
        return torch.cat([above, rows, below], 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        above, below = _borders(gradient[:, :, -1], gradient[:, :, 0], ctx.group)
        own = gradient[:, :, 1:-1].clone()
        own[:, :, :1] += above
        own[:, :, -1:] += below
        return own, None


def _borders(last: torch.Tensor, first: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """`last` of the previous process and `first` of the next, [B, C, 1, W]; zeros at the ends."""
    own = torch.stack([last, first])
    every = own.new_empty((2 * group.size(), *last.shape))
    dist.all_gather_into_tensor(every, own, group=group)
    none, at = torch.zeros_like(last), 2 * group.rank()
    before = every[at - 2] if at else none
    after = every[at + 3] if at + 2 < len(every) else none
    return before.unsqueeze(2), after.unsqueeze(2)


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
