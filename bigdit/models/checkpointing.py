"""Activation checkpointing: blocks that are recomputed in the backward pass, each alone or in segments."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from bigdit.errors import UserError
from bigdit.models.family import Family
from bigdit.strategy import SegmentSpec, Strategy
from bigdit.units import how_many

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns the contexts of the forward pass and of its recomputation."""

aten = torch.ops.aten

# Matrix products and attention take the most time for each byte that they save. Attention has an operator for the CPU,
# one for each of CUDA's three kernels, and torch's mathematical form (bmm).
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


def apply_checkpointing(model: nn.Module, family: Family, strategy: Strategy) -> None:
    """Recompute the strategy's first blocks in the backward pass; the others keep their activations.

    `selective` blocks keep the outputs of matrix products, convolutions and attention, and recompute the rest. Only a
    block's `forward` is replaced: parameters keep their names, and modules keep the engines' hooks. Raises UserError if
    the model has fewer blocks.
    """
    blocks, asked = family.blocks(model), strategy.checkpointed_blocks
    first = len(blocks) if asked == "all" else asked
    if first > len(blocks):
        raise UserError(f"strategy.checkpointed_blocks is {first}, and the model has {how_many(len(blocks), 'block')}")
    segments = strategy.checkpointed_segments or SegmentSpec()
    if segments.stride > len(blocks):
        key = "blocks" if segments.every is None else "every"
        raise UserError(
            f"strategy.checkpointed_segments.{key} is {segments.stride}, and the model has "
            f"{how_many(len(blocks), 'block')}; set it to {len(blocks)} or less"
        )
    # A block uses no random numbers (dropout is 0 in pre-training configs), so the RNG state is not kept: copying it
    # would synchronise with the device.
    run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    contexts: Contexts = noop_context_fn
    if strategy.checkpointing == "selective":
        contexts = functools.partial(_selective, frozenset(_kept()))
    for number, block in enumerate(blocks[:first]):
        place = number % segments.stride
        if place < segments.blocks:
            before = blocks[number - 1] if place else None
            last = place == segments.blocks - 1 or number == first - 1
            block.forward = functools.partial(_checkpointed, run, contexts, block, block.forward, before, last)


def _kept() -> list[torch._ops.OpOverload]:
    """The operators whose outputs are kept; the one of an nf4 base exists only if bitsandbytes is imported."""
    nf4 = getattr(torch.ops.bitsandbytes, "gemm_4bit", None)
    return [*KEPT, *(() if nf4 is None else (nf4.default,))]


def _selective(kept: Collection[Any]) -> tuple[_Keeping, _Reusing]:
    """torch's `create_selective_checkpoint_contexts` without support for compiled blocks, to save CPU time for each
    operator. Compiled blocks are never selective."""
    keeping = _Keeping(kept)
    return keeping, _Reusing(keeping.returned)


class _Uncompiled(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping the compiler takes time at every operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keeping(_Uncompiled):
    """Keeps the outputs of some operators, in order, with the version of each tensor."""

    def __init__(self, kept: Collection[Any]) -> None:
        super().__init__()
        self._kept, self.returned = kept, defaultdict[Any, list[Any]](list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if func in self._kept:
            several = returned if isinstance(returned, tuple) else (returned,)
            self.returned[func].append([_detached(each) for each in several])
        return returned


def _detached(value: Any) -> tuple[Any, int]:
    """The tensor without its graph, which would be a reference cycle, and its version, which both tensors share."""
    if not isinstance(value, torch.Tensor):
        return value, 0
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        kept = value.detach()
    return kept, kept._version


class _Reusing(_Uncompiled):
    """Returns each kept output once, instead of running the operator."""

    def __init__(self, returned: Mapping[Any, list[Any]]) -> None:
        super().__init__()
        self._returned, self._calls = returned, Counter[Any]()

    def __enter__(self) -> _Reusing:
        self._calls.clear()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        every = self._returned.get(func)
        if every is None:
            return func(*args, **(kwargs or {}))
        number = self._calls[func]
        self._calls[func] += 1
        kept = every[number] if number < len(every) else None
        if kept is None:
            raise RuntimeError(f"the backward pass of a selective block has {func} once more than was kept")
        every[number] = None
        if any(isinstance(value, torch.Tensor) and value._version != version for value, version in kept):
            raise RuntimeError(f"a selective block wrote into what {func} returned, which it keeps")
        values = tuple(value for value, _ in kept)
        return values if len(values) > 1 else values[0]


def _checkpointed(
    run: Callable[..., Any],
    contexts: Contexts,
    block: nn.Module,
    forward: Callable[..., Any],
    before: nn.Module | None,
    last: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Checkpoint a block without keeping the outputs of the block `before`, which is recomputed with it.

    So a segment keeps the inputs of its first block, and inputs of others that come from elsewhere. All arguments are
    positional for torch: autograd does not save keyword arguments, so offload would not move them.
    """
    earlier, count, names = _Earlier(before, [*args, *kwargs.values()]), len(args), tuple(kwargs)
    saving, reusing = contexts()  # checkpoint's own contexts would include recomputation of other blocks

    def call(*others: Any) -> tuple[Any, torch.Tensor | None]:
        given = earlier.joined(others)
        _gather(block)
        with reusing if earlier.gone else saving:
            returned = forward(*given[:count], **dict(zip(names, given[count:], strict=True)))
        if last:
            return returned, None
        return returned, _Recomputed.apply(torch.empty(0, requires_grad=True), *map(torch.detach, _tensors(returned)))

    returned, recomputed = run(call, *earlier.others)
    earlier.forget()
    if recomputed is not None and recomputed.grad_fn is not None:
        _sign(_Signature(block, recomputed, {}), _tensors(returned))
    return returned


class _Recomputed(torch.autograd.Function):
    """Saves a block's outputs. The checkpoint around it keeps none: `saved_tensors` of the node recomputes the
    block."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, *returned: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*returned)
        return torch.empty(0)


@dataclass(frozen=True, eq=False)
class _Signature:
    """An attribute of the storages of a block's outputs: the output of its _Recomputed, and each tensor's number by its
    place. The tensors themselves cannot have it, because engines pass views to the next block."""

    block: nn.Module
    recomputed: torch.Tensor
    numbers: dict[Any, int]

    @property
    def found(self) -> tuple[torch.Tensor, ...]:
        """The block's outputs, recomputed."""
        node: Any = self.recomputed.grad_fn
        return node.saved_tensors


def _sign(signature: _Signature, returned: Sequence[torch.Tensor]) -> None:
    for number, tensor in enumerate(returned):
        signature.numbers[_place(tensor)] = number
        setattr(tensor.untyped_storage(), _SIGNATURE, signature)


_SIGNATURE = "bigdit_signature"


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The position in its storage, and the version of its data."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor._version,
    )


class _Earlier:
    """Arguments that the block `before` returned, and the `others`, with None in the places of the first.

    In the forward pass `joined` returns them; once they are `gone`, it recomputes them.
    """

    def __init__(self, before: nn.Module | None, given: Sequence[Any]) -> None:
        self.gone, self.others = False, list(given)
        self._live: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, tuple[int, bool]] = {}
        self._signature: _Signature | None = None
        for at, each in enumerate(given):
            if before is None or not isinstance(each, torch.Tensor):
                continue
            signature: _Signature | None = getattr(each.untyped_storage(), _SIGNATURE, None)
            if signature is None or signature.block is not before or self._signature not in (None, signature):
                continue
            if (number := signature.numbers.get(_place(each))) is not None:
                self._signature, self._numbers[at] = signature, (number, each.requires_grad)
                self._live[at], self.others[at] = each, None

    def forget(self) -> None:
        """Release the arguments, after the forward pass."""
        self.gone, self.others = True, []
        self._live.clear()

    def joined(self, others: Sequence[Any]) -> list[Any]:
        """All arguments, in order."""
        given = list(others)
        found = self._signature.found if self.gone and self._signature is not None else ()
        for at, (number, required) in self._numbers.items():
            given[at] = found[number].detach().requires_grad_(required) if self.gone else self._live[at]
        return given


def _gather(block: nn.Module) -> None:
    """Gather the block's own weights: it may be recomputed before an engine gathers them for its backward pass."""
    if hasattr(block, "unshard"):  # FSDP2's
        block.unshard()
    for parameter in block.parameters(recurse=False):
        if hasattr(parameter, "all_gather"):  # ZeRO-3's; modules within gather theirs
            parameter.all_gather()


def _tensors(returned: Any) -> list[torch.Tensor]:
    every = returned if isinstance(returned, tuple) else (returned,)
    return [each for each in every if isinstance(each, torch.Tensor)]
