"""Regional compilation: torch compiles the repeated block, and blocks that are alike share what it made.

Source: PyTorch's recipe on regional compilation; `compile_repeated_blocks` of diffusers' ModelMixin.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from bigdit.emulator import on_emulated_gpu
from bigdit.errors import UserError
from bigdit.models.family import Family

_DISABLED = "TORCHDYNAMO_DISABLE"


def compile_blocks(model: nn.Module, family: Family, backend: str | Callable[..., Any] = "inductor") -> None:
    """Have each block compiled when it is called with shapes or strides that no block was called with before.

    To be applied before checkpointing and offload: the graphs of a class's own `forward` are found by its code, and
    blocks share them; of what stands in its place each block would have its own, or none. Each bucket has graphs of
    its own: of sizes that may change, Inductor of torch 2.13 does not know how convolutions lie in memory. On an
    emulated GPU, whose kernels are not run, blocks stay as they are. Raises UserError where torch is told not to
    compile.
    """
    if os.environ.get(_DISABLED) == "1":
        raise UserError(f"strategy.compile_blocks is true, and {_DISABLED} is 1; unset it, or leave compile_blocks out")
    if on_emulated_gpu():
        return
    import torch._dynamo as dynamo  # which takes a second to import

    dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit  # 8 else: four buckets, and then none
    for block in family.blocks(model):
        compiled = torch.compile(block.forward, backend=backend, dynamic=False)
        block.forward = functools.partial(_called, compiled, block.forward)


def _called(compiled: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The block as it is written where a mode looks at its operators, which a compiled one does not show."""
    return (forward if is_in_torch_dispatch_mode() else compiled)(*args, **kwargs)


@contextmanager
def compiling_told() -> Iterator[None]:
    """What torch cannot compile within is a UserError."""
    try:
        yield
    except RuntimeError as error:
        if not any(each.__module__ == "torch._dynamo.exc" for each in type(error).__mro__):
            raise
        inner = getattr(error, "inner_exception", error)
        why = ": ".join([type(inner).__name__, *str(inner).splitlines()[:1]])
        raise UserError(
            f"strategy.compile_blocks: torch cannot compile a block: {why}; leave compile_blocks out"
        ) from error


def compiling_said(*, emulated: bool) -> str:
    """What becomes of compiled blocks, for people."""
    if emulated:
        return "strategy.compile_blocks: an emulated GPU runs no kernels, and blocks run as they are written"
    return "strategy.compile_blocks: the first step waits for torch's compiler"
