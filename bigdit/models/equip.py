"""What a strategy changes in a model before an engine takes it: LoRA, a ControlNet, FP8, compiled and swapped blocks,
checkpointing, offload of activations.

A ControlNet is diffusers' class, and starts as the transformer's first blocks. Source: Zhang et al.,
arXiv:2302.05543; diffusers' ControlNets of transformers, their `from_transformer`, and its scripts
train_controlnet_flux.py, train_controlnet_sd3.py and train_controlnet_sana.py.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
import traceback
import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import diffusers
import torch
from accelerate import init_empty_weights
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bigdit import libraries
from bigdit.cache import VARIABLE
from bigdit.catalog.families import CONTROLNET, FAMILIES
from bigdit.errors import UserError
from bigdit.files import FULL, why_unwritten
from bigdit.models.build import outline
from bigdit.models.checkpointing import apply_checkpointing
from bigdit.models.families import family as family_of
from bigdit.models.family import CONTROL_IMAGE, Family, arguments
from bigdit.models.float8 import use_float8
from bigdit.models.swap import swap_blocks
from bigdit.strategy import ControlNetSpec, ModelSpec, Strategy
from bigdit.units import how_many


def equip(
    model: nn.Module, family: Family, strategy: Strategy, *, seed: int = 0, backend: str = "inductor"
) -> nn.Module:
    """The model, in place, with all that the strategy adds to it.

    `seed`: of the adapters' values; `backend`: of torch's compiler. Raises UserError if more blocks are swapped or
    checkpointed than the model has, or if a target of the adapters is no linear layer.
    """
    adapt(model, family, strategy, seed=seed)
    return arrange(model, family, strategy, backend=backend)


def adapt(model: nn.Module, family: Family, strategy: Strategy, *, seed: int = 0) -> None:
    """Add the strategy's adapters, or its ControlNet."""
    frozen = family.blocks(model)
    if strategy.controlnet is not None:
        add_controlnet(model, family, strategy.controlnet)
    if strategy.lora is None and strategy.base in (None, "bf16"):
        return
    with libraries.uncompiled():
        from bigdit.models.lora import apply_lora, quantise  # peft and bitsandbytes take seconds to import

    if strategy.lora is not None:
        apply_lora(model, family, strategy.lora, seed=seed)
    elif strategy.base is not None:
        quantise(frozen, strategy.base)


def adapt_text(model: nn.Module, encoders: Mapping[str, nn.Module], strategy: Strategy, *, seed: int = 0) -> None:
    """Make text encoders a part of the model, with the strategy's adapters. Their values are drawn from `seed`."""
    assert strategy.lora is not None
    with libraries.uncompiled():
        from bigdit.models.lora import adapt_text as add

    add(model, encoders, strategy.lora, seed=seed)


def arrange(model: nn.Module, family: Family, strategy: Strategy, *, backend: str = "inductor") -> nn.Module:
    """All that `equip` does, except adapters and ControlNet."""
    if strategy.float8 != "none":
        use_float8(model, family, strategy.float8)
    if strategy.compile_blocks:
        apart = strategy.engine == "fsdp2" and strategy.float8 == "tensorwise"
        compile_blocks(model, family, backend, whole=strategy.cp > 1, apart=apart)
    if strategy.blocks_to_swap:
        trained = not strategy.frozen
        swap_blocks(model, family, strategy.blocks_to_swap, trained=trained, quantised=strategy.packed)
    join_gradients(model, family)
    apply_checkpointing(model, family, strategy)
    if strategy.offload_activations:
        offload_activations(model, family, strided=strategy.compile_blocks)
    return model


_DISABLED = "TORCHDYNAMO_DISABLE"

# shape_padding measures whether padded products are faster, so no plan could know their memory. In blocks with
# convolutions (Sana) layout_optimization of torch 2.13 also changes the mask's layout, and attention rejects it.
# Combined kernels of equal sizes that do not need each other, as for gradients of three biases, share a launch. With
# mix_order_reduction, which sums over rows and columns in one kernel, torch 2.13 cannot compile SD3.5-Medium in FP8 at
# 512 × 512; without, its steps in bf16 have 10 % fewer kernels and move 1 % more bytes.
_INDUCTOR = {
    "shape_padding": False,
    "layout_optimization": False,
    "combo_kernels": True,
    "combo_kernel_allow_mixed_sizes": 0,
    "triton.mix_order_reduction": False,
}


def compile_blocks(
    model: nn.Module,
    family: Family,
    backend: str | Callable[..., Any] = "inductor",
    *,
    whole: bool = False,
    apart: bool = False,
) -> None:
    """Compile each block when it is first called with new shapes or strides.

    Regional compilation: equal blocks share their graphs. Call it before checkpointing and offload: torch finds graphs
    by the code of the class's own `forward`, not by that of replacements. Each bucket has its own graphs: with dynamic
    sizes, Inductor of torch 2.13 does not know how convolutions lie in memory. `whole`: a graph break is an error;
    between pieces, torch 2.13 loses attention over processes, and gradients are wrong. `apart`: a block's outputs share
    no memory; with FSDP2's FP8 weights, torch 2.13 cannot compile two slices of one tensor, as in Flux.1's single
    blocks. Raises UserError if an environment variable disables the compiler.

    Source: PyTorch's recipe on regional compilation; `compile_repeated_blocks` of diffusers' ModelMixin.
    """
    if os.environ.get(_DISABLED) == "1":
        raise UserError(f"strategy.compile_blocks is true, and {_DISABLED} is 1; unset it, or leave compile_blocks out")
    import torch._dynamo as dynamo  # here: it takes a second to import

    dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit  # 8 are enough for four buckets
    *_, last = blocks = family.blocks(model)
    unread = 0 if hasattr(model, CONTROLNET) else family.unread  # a ControlNet has its own last block
    options = _INDUCTOR if backend == "inductor" else None
    compiled = functools.cache(
        functools.partial(torch.compile, backend=backend, dynamic=False, options=options, fullgraph=whole)
    )
    for block in blocks:
        forward = _apart(type(block).forward) if apart else type(block).forward
        if block is last and unread is not None:
            forward = _detached(forward, unread)
        block.forward = types.MethodType(compiled(forward), block)


@functools.cache
def _apart(own: Callable[..., Any]) -> Callable[..., Any]:
    """A class's own forward that copies each of several outputs. The compiler often writes to the copy directly.

    It is cached, because torch finds graphs by it.
    """

    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = own(block, *args, **kwargs)
        if not isinstance(found, tuple):
            return found
        return tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in found)

    return forward


def _detached(forward: Callable[..., Any], unread: int) -> Callable[..., Any]:
    """A block's `forward` whose output number `unread` is detached. Otherwise the compiler makes a missing gradient
    zeros, and weight decay would change weights that the loss does not depend on."""

    def detached(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        if not isinstance(found, tuple):
            return found
        return tuple(each.detach() if place == unread else each for place, each in enumerate(found))

    return detached


@contextmanager
def compile_errors() -> Iterator[None]:
    """Raise a UserError if torch cannot compile, or cannot read or write its cache."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch sets it when it first compiles
        calls = (str(call.f_globals.get("__name__")) for call, _ in traceback.walk_tb(error.__traceback__))
        of_cache = isinstance(error, OSError) and any(call.startswith(("torch._inductor", "triton.")) for call in calls)
        if not of_cache and not any(each.__module__ == "torch._dynamo.exc" for each in type(error).__mro__):
            raise
        inner = getattr(error, "inner_exception", error)
        if cache is not None and isinstance(inner, OSError):
            _raise_unwritten(inner, cache)
        # For a wrong shape torch's first line says only that a call failed; the cause is in the text.
        cause = re.search(r"got (\w+)\(['\"](.*?)['\"]\)", str(inner))
        why = ": ".join(cause.groups() if cause else [type(inner).__name__, *str(inner).splitlines()[:1]])
        # For a damaged file it says only that it cannot be imported.
        or_cache = f", or remove the compiler's cache {cache}" if cache is not None and cache in why else ""
        raise UserError(
            f"strategy.compile_blocks: torch cannot compile a block: {why}; leave compile_blocks out{or_cache}"
        ) from error


def _raise_unwritten(error: OSError, cache: str) -> None:
    """Raise UserError if the compiler could not write its cache."""
    where = str(error.filename or cache)
    if error.errno in FULL or (error.errno in (errno.EROFS, errno.EACCES, errno.ENOTDIR) and where.startswith(cache)):
        emulated = os.environ.get("BIGDIT_EMULATED_CACHE")
        key = VARIABLE if emulated and where.startswith(emulated) else "TORCHINDUCTOR_CACHE_DIR"
        raise UserError(
            f"strategy.compile_blocks: torch's compiler cannot write {where}: {why_unwritten(error, Path(where))}; set "
            f"{key} to another folder"
        ) from error


def compile_notices(strategy: Strategy, buckets: int) -> list[str]:
    """What to log about compiled blocks before the first step."""
    if not strategy.compile_blocks:
        return []
    waits = f"the first step of each of {how_many(buckets, 'bucket')} waits" if buckets > 1 else "the first step waits"
    return [f"strategy.compile_blocks: {waits} for torch's compiler"]


class CompiledGraphs:
    """Counts the graphs that torch compiles in a run's steps. Each size of a micro-batch should be compiled once."""

    def __init__(self, strategy: Strategy) -> None:
        self._sizes, self._breaks = set[Hashable](), set[str]()
        self._counters: dict[str, Counter[str]] = {}
        if strategy.compile_blocks:
            from torch._dynamo.utils import counters  # here: it takes a second to import

            self._counters = counters
        self.begin()

    def begin(self) -> None:
        """Start to count for a step. Samples and validation between steps have graphs of their own."""
        self._before = self._count()

    def lines(self, done: int, sizes: Collection[Hashable]) -> list[str]:
        """What to log after step number `done`, with micro-batches of these sizes."""
        made, new = self._count() - self._before, {*sizes} - self._sizes
        self._sizes |= new
        lines = self.breaks()
        if made and new:
            lines.append(f"step {done}: compiled {how_many(made, 'graph')} for {how_many(len(new), 'new size')}")
        elif made:
            more = how_many(made, "more graph")
            lines.append(f"step {done}: compiled {more} for known sizes, which takes time; see TORCH_LOGS=recompiles")
        return lines

    def breaks(self) -> list[str]:
        """New reasons why torch cannot compile a block in one piece."""
        breaks = {*self._counters.get("graph_break", ())} - self._breaks
        self._breaks |= breaks
        return [f"a block is compiled in pieces, which costs speed: {why.splitlines()[0]}" for why in sorted(breaks)]

    def _count(self) -> int:
        return self._counters["stats"]["unique_graphs"] if self._counters else 0


def join_gradients(model: nn.Module, family: Family) -> None:
    """Make each block return one split instead of consecutive slices of a tensor.

    Call it before checkpointing, which recomputes the block's own forward.
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
    """Whether it is a direct slice, in autograd's graph, of the tensor that it is a view of."""
    if not isinstance(piece, torch.Tensor) or piece.grad_fn is None or piece._base is None:
        return False
    whole = piece._base.grad_fn
    return piece.grad_fn.name() == "SliceBackward0" and piece.grad_fn.next_functions[0][0] is whole is not None


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one._base is other._base and one.storage_offset() == other.storage_offset()
    return same and one.shape == other.shape and one.stride() == other.stride()


Packed: TypeAlias = "torch.Tensor | tuple[torch.device, torch.Tensor, tuple[int, ...], torch.Size | None]"


def offload_activations(model: nn.Module, family: Family, *, strided: bool = False) -> None:
    """Copy what autograd saves in each block to CPU memory, and back when the backward pass needs it.

    Call it after checkpointing: then inputs of checkpointed blocks move; what selective blocks keep stays, as weights
    do. A tensor that several operations save is copied for each, an expanded one as the memory behind it. CPU memory is
    pinned if the device is a GPU. `strided`: slices return with their strides, as compiled blocks expect, in as much
    memory as they spanned.
    """
    for block in family.blocks(model):
        # Read now, before an engine shards the parameters.
        sizes = {parameter.numel() for parameter in block.parameters()}
        to_host = functools.partial(_to_host, block, sizes, strided)
        block.forward = functools.partial(_offloaded, to_host, block.forward)


def _offloaded(to_host: Callable[..., Packed], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(to_host, _to_device):
        return forward(*args, **kwargs)


def _to_host(block: nn.Module, sizes: set[int], strided: bool, tensor: torch.Tensor) -> Packed:
    # Like torch.autograd.graph.save_on_cpu, which also moves weights, and loses the strides.
    if is_traceable_wrapper_subclass(tensor) or (tensor.numel() in sizes and _is_weight(block, tensor)):
        return tensor  # FSDP2's weights in FP8 are such wrappers
    expanded, strides = None, tensor.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if 0 < span < tensor.numel():  # a mask for all queries and heads: attention asks for its strides, too
        expanded = tensor.shape
        tensor = tensor.as_strided((span,), (1,))
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host, strides if strided or expanded is not None else host.stride(), expanded


def _to_device(packed: Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host, strides, expanded = packed
    if expanded is not None:
        return host.to(device, non_blocking=True).as_strided(expanded, strides)
    if strides == host.stride():
        return host.to(device, non_blocking=True)
    return torch.empty_strided(host.shape, strides, dtype=host.dtype, device=device).copy_(host, non_blocking=True)


def _is_weight(block: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or a view of one, by its storage: engines gather parameters, and free them."""
    storage = tensor.untyped_storage()._cdata
    return any(parameter.untyped_storage()._cdata == storage for parameter in block.parameters())


_CONTROLNET_ZEROS = ("controlnet_", "pos_embed_input.", "input_block.")
"""Prefixes of a ControlNet's parameters that start as zeros."""
_RESIDUALS = {"controlnet_block_samples": "block_controlnet_hidden_states"}
"""SD3's name of the residuals."""


def add_controlnet(model: nn.Module, family: Family, spec: ControlNetSpec) -> None:
    """Freeze the model, and add a ControlNet in its dtype, which runs first if an image is given.

    Raises UserError if the model has no ControlNet, or fewer blocks.
    """
    device = next(model.parameters()).device
    controlnet = _outlined(model, family, spec, device)
    theirs, own = model.state_dict(), controlnet.state_dict()
    started = {
        name: theirs[name] if name in theirs else torch.zeros_like(tensor, device=device)
        for name, tensor in own.items()
    }
    for name, tensor in own.items():
        if not (name in theirs or name.startswith(_CONTROLNET_ZEROS)) or started[name].shape != tensor.shape:
            raise UserError(
                f"strategy.controlnet cannot start as the first blocks of this {family.CLASS_NAME}, which has no such "
                f"{name}; set fewer layers than it has, or take another model"
            )
    controlnet.load_state_dict(started, assign=True)
    nn.Module._apply(controlnet, torch.clone)  # copies, which are not written where an emulated GPU needs none
    model.requires_grad_(False)
    setattr(model, CONTROLNET, controlnet.requires_grad_(True))
    taken = inspect.signature(controlnet.forward).parameters.keys(), inspect.signature(model.forward).parameters.keys()
    model.forward = functools.partial(_controlled, model.forward, controlnet, *taken)  # an engine's hooks surround it


def controlnet(model: ModelSpec, spec: ControlNetSpec) -> nn.Module:
    """The ControlNet of a model in CPU memory and fp32, with its buffers, and parameters on the meta device."""
    return _outlined(outline(model), family_of(model.class_name), spec, torch.device("cpu"))


def _outlined(model: nn.Module, family: Family, spec: ControlNetSpec, device: torch.device) -> nn.Module:
    """The ControlNet of the model in its dtype, with its buffers on `device`, and parameters on the meta device."""
    inputs = FAMILIES[family.CLASS_NAME]
    if inputs.controlnet is None:
        raise UserError(f"strategy.controlnet: diffusers has no ControlNet of {family.CLASS_NAME}; leave it out")
    sizes, there = (spec.layers, spec.single_layers), [len(getattr(model, name)) for name in inputs.depths]
    for size, most in zip(sizes, (*there, 0), strict=False):
        if size > most:
            raise UserError(f"strategy.controlnet has {size} blocks of a kind of which the model has {most}; set fewer")
    made_by = getattr(diffusers, inputs.controlnet)
    layers = dict(zip(inputs.depths.values(), sizes, strict=False))
    # Its pipeline then shifts the image's latents as all latents, and feeds it the pooled text (SD3).
    made = {**arguments(model), **layers, "force_zeros_for_pooled_projection": False}
    with torch.device(device), init_empty_weights(include_buffers=False):
        known = inspect.signature(made_by).parameters
        controlnet: nn.Module = made_by(**{key: each for key, each in made.items() if key in known})
    return nn.Module.to(controlnet, next(model.parameters()).dtype).train()


def _controlled(
    forward: Callable[..., Any], controlnet: nn.Module, taken: Any, known: Any, *args: Any, **given: Any
) -> Any:
    """The transformer's own `forward`, with the residuals of the ControlNet if there is an image."""
    if CONTROL_IMAGE not in given:
        return forward(*args, **given)
    found = controlnet(**{name: each for name, each in given.items() if name in taken} | {"return_dict": True})
    residuals = {name if name in known else _RESIDUALS[name]: each for name, each in found.items()}
    return forward(*args, **{name: each for name, each in given.items() if name != CONTROL_IMAGE}, **residuals)
