"""What a strategy changes in the plain model before an engine takes it: LoRA, FP8, compiled and swapped blocks,
checkpointing, offload of activations."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bigdit import libraries
from bigdit.errors import UserError
from bigdit.models.family import Family
from bigdit.models.float8 import use_float8
from bigdit.models.swap import swap_blocks
from bigdit.strategy import Strategy
from bigdit.units import how_many


def equip(
    model: nn.Module, family: Family, strategy: Strategy, *, seed: int = 0, backend: str = "inductor"
) -> nn.Module:
    """The model, in place, with all that the strategy adds to it.

    `seed`: of the adapters' values; `backend`: torch's compiler. Raises UserError where the model has fewer blocks than
    are swapped or checkpointed, or where a target of the adapters is no linear layer.
    """
    adapt(model, family, strategy, seed=seed)
    return arrange(model, family, strategy, backend=backend)


def adapt(model: nn.Module, family: Family, strategy: Strategy, *, seed: int = 0) -> None:
    """Add the strategy's adapters."""
    if strategy.lora is not None:
        with libraries.uncompiled():
            from bigdit.models.lora import apply_lora  # peft and bitsandbytes take seconds to import

        apply_lora(model, family, strategy.lora, seed=seed)


def arrange(model: nn.Module, family: Family, strategy: Strategy, *, backend: str = "inductor") -> nn.Module:
    """All that `equip` does but the adapters."""
    if strategy.float8 != "none":
        use_float8(model, family, strategy.float8)
    if strategy.compile_blocks:
        compile_blocks(model, family, backend)
    if strategy.blocks_to_swap:
        swap_blocks(model, family, strategy.blocks_to_swap, trained=strategy.lora is None)
    join_gradients(model, family)
    apply_checkpointing(model, family, strategy.checkpointed_blocks, strategy.checkpointing)
    if strategy.offload_activations:
        offload_activations(model, family)
    return model


_DISABLED = "TORCHDYNAMO_DISABLE"


def compile_blocks(model: nn.Module, family: Family, backend: str | Callable[..., Any] = "inductor") -> None:
    """Have each block compiled when it is first called with new shapes or strides.

    Regional compilation: blocks that are alike share their graphs. Apply it before checkpointing and offload: torch
    finds graphs by the code of a class's own `forward`, and what replaces that has none. Each bucket has its own
    graphs: with sizes that may change, Inductor of torch 2.13 does not know how convolutions lie in memory. Raises
    UserError where a variable keeps torch from compiling.

    Source: PyTorch's recipe on regional compilation; `compile_repeated_blocks` of diffusers' ModelMixin.
    """
    if os.environ.get(_DISABLED) == "1":
        raise UserError(f"strategy.compile_blocks is true, and {_DISABLED} is 1; unset it, or leave compile_blocks out")
    import torch._dynamo as dynamo  # here: it takes a second to import

    # torch finds by time whether products are faster with padding: then no plan could say what they take.
    options = {"shape_padding": False} if backend == "inductor" else None
    dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit  # else 8: four buckets, and then none
    for block in family.blocks(model):
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False, options=options)


@contextmanager
def compile_errors() -> Iterator[None]:
    """Make a UserError of what torch cannot compile within, and of files of its cache that it cannot read or write."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # which torch sets when it first compiles
        of_cache = isinstance(error, OSError) and cache is not None and str(error.filename).startswith(cache)
        if not of_cache and not any(each.__module__ == "torch._dynamo.exc" for each in type(error).__mro__):
            raise
        inner = getattr(error, "inner_exception", error)
        why = ": ".join([type(inner).__name__, *str(inner).splitlines()[:1]])
        # Of a damaged file it says no more than that it cannot be imported.
        or_cache = f", or remove the compiler's cache {cache}" if cache is not None and cache in why else ""
        raise UserError(
            f"strategy.compile_blocks: torch cannot compile a block: {why}; leave compile_blocks out{or_cache}"
        ) from error


def compile_notices(strategy: Strategy) -> list[str]:
    """What to log about compiled blocks, before the first step."""
    return ["strategy.compile_blocks: the first step waits for torch's compiler"] if strategy.compile_blocks else []


def join_gradients(model: nn.Module, family: Family) -> None:
    """Have each block return one split in place of consecutive slices that make up a tensor.

    Apply it before checkpointing, whose recomputation is the block's own.
    """
    for block in family.blocks(model):
        block.forward = functools.partial(_split, block.forward)


def _split(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    pieces = forward(*args, **kwargs)
    if not isinstance(pieces, tuple) or len(pieces) < 2 or not all(_is_slice(piece) for piece in pieces):
        return pieces
    whole = pieces[0]._base
    for dim in range(whole.dim()):
        sizes = [piece.shape[dim] for piece in pieces]
        if sum(sizes) == whole.shape[dim]:
            split = whole.split_with_sizes(sizes, dim)
            if all(map(_same_view, pieces, split)):
                return split
    return pieces


def _is_slice(piece: Any) -> bool:
    """Whether autograd has it as a direct slice of the tensor that it is a view of."""
    if not isinstance(piece, torch.Tensor) or piece.grad_fn is None or piece._base is None:
        return False
    whole = piece._base.grad_fn
    return piece.grad_fn.name() == "SliceBackward0" and piece.grad_fn.next_functions[0][0] is whole is not None


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one._base is other._base and one.storage_offset() == other.storage_offset()
    return same and one.shape == other.shape and one.stride() == other.stride()


aten = torch.ops.aten

# Matrix products and attention: they cost most to compute for each byte that it takes to keep them. The CPU, CUDA's
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

    `selective` blocks keep the outputs of matrix products, convolutions and attention, and recompute the rest. A
    block's `forward` is replaced, not the block: parameters keep their names, and modules the hooks of engines. Raises
    UserError where the model has fewer blocks.
    """
    blocks = family.blocks(model)
    if first == "all":
        first = len(blocks)
    if first > len(blocks):
        raise UserError(f"strategy.checkpointed_blocks is {first}, and the model has {how_many(len(blocks), 'block')}")
    # A block uses no random numbers (dropout is 0 in pre-training configs), so the RNG state is not kept: copying it
    # would synchronise with the device.
    run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if kind == "selective":
        run = functools.partial(run, context_fn=functools.partial(create_selective_checkpoint_contexts, _kept()))
    for block in blocks[:first]:
        block.forward = functools.partial(run, block.forward)


def _kept() -> list[torch._ops.OpOverload]:
    """The operators whose outputs are kept; that of an nf4 base exists once bitsandbytes is imported."""
    nf4 = getattr(torch.ops.bitsandbytes, "gemm_4bit", None)
    return [*KEPT, *(() if nf4 is None else (nf4.default,))]


Packed: TypeAlias = "torch.Tensor | tuple[torch.device, torch.Tensor, tuple[torch.Size, tuple[int, ...]] | None]"


def offload_activations(model: nn.Module, family: Family) -> None:
    """Copy what autograd saves in each block to CPU memory, and back when the backward pass needs it.

    Apply it after checkpointing: then the inputs of a checkpointed block move, and what a selective one keeps stays.
    Weights stay too. A tensor that several operations save is copied for each; an expanded one as the memory behind it.
    CPU memory is pinned where the device is a GPU. On a CPU the copy saves nothing.
    """
    for block in family.blocks(model):
        # Taken now, before an engine takes the parameters apart.
        sizes = {parameter.numel() for parameter in block.parameters()}
        to_host = functools.partial(_to_host, block, sizes)
        block.forward = functools.partial(_offloaded, to_host, block.forward)


def _offloaded(to_host: Callable[..., Packed], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(to_host, _to_device):
        return forward(*args, **kwargs)


def _to_host(block: nn.Module, sizes: set[int], tensor: torch.Tensor) -> Packed:
    # As torch.autograd.graph.save_on_cpu, which moves weights too, and forgets the strides.
    if is_traceable_wrapper_subclass(tensor) or (tensor.numel() in sizes and _is_weight(block, tensor)):
        return tensor  # FSDP2's weights in FP8 are such wrappers
    expanded = None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if 0 < span < tensor.numel():  # a mask for all queries and heads: attention asks for its strides, too
        expanded = tensor.shape, tensor.stride()
        tensor = tensor.as_strided((span,), (1,))
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host, expanded


def _to_device(packed: Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host, expanded = packed
    tensor = host.to(device, non_blocking=True)
    return tensor if expanded is None else tensor.as_strided(*expanded)


def _is_weight(block: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or a view of one, by its storage: engines gather parameters, and free them."""
    storage = tensor.untyped_storage()._cdata
    return any(parameter.untyped_storage()._cdata == storage for parameter in block.parameters())
