"""Products of quantised weights, by bitsandbytes.

Shown by the referee's rows with lora.base nf4.
"""

from __future__ import annotations

import ast
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bigdit.rehearse.scratch.blas import Workspaces
from bigdit.rehearse.scratch.launch import Launch, Rule
from bigdit.rehearse.scratch.layout import copies

_OPS = "backends/cuda/ops.py"
_CHOICE, _ALWAYS = "_gemm_4bit_use_custom_cuda", "_GEMM_4BIT_CUSTOM_FLOOR_M"
_MOST_ROWS = 1536  # _gemm_4bit_custom_max_m


class QuantisedProducts:
    """By name: these operators exist once bitsandbytes is imported."""

    def __init__(self, workspaces: Workspaces) -> None:
        self._workspaces = workspaces

    def by_name(self) -> dict[str, Rule]:
        """The rule of each operator."""
        return {
            "bitsandbytes.gemm_4bit.default": self._gemm_4bit,
            "bitsandbytes.quantize_4bit.default": _scales_first,
            "bitsandbytes.quantize_blockwise.default": _scales_first,
        }

    def _gemm_4bit(
        self,
        launch: Launch,
        input: torch.Tensor,
        packed: torch.Tensor,
        shape: Sequence[int],
        absmax: torch.Tensor,
        blocksize: int,
        kind: str,
        bias: torch.Tensor | None = None,
        *rest: Any,
    ) -> None:
        """Either a kernel of its own, or the weight in the input's dtype, for torch's own product, to which a bias is
        added by itself where rows do not lie one behind the other.

        Source: gemm_4bit in bitsandbytes/backends/cuda/ops.py, 0.50; linear in aten/src/ATen/native/Linear.cpp.
        """
        columns, inner = shape
        rows = input.numel() // inner
        card = launch.card
        choose = _choice(card.multiprocessors, *card.compute_capability)
        if inner % blocksize == 0 and choose(input.dtype, rows, columns, inner):
            with launch.holding(*copies(input)):
                launch.results()
            return
        with launch.holding(math.prod(shape) * input.element_size()):
            if bias is not None and (input.dim() == 2 or input.is_contiguous()):
                self._workspaces.biased(launch, bias)
            else:
                self._workspaces.product(launch)


@functools.cache
def _choice(multiprocessors: int, major: int, minor: int) -> Callable[[torch.dtype, int, int, int], bool]:
    """Whether bitsandbytes multiplies by a kernel of its own: given dtype, rows, columns and inner dimension.

    A long table by card and shape, taken from the installed library's source: its module wants a GPU to be imported.
    """
    package = Path(str(sys.modules["bitsandbytes"].__file__)).parent
    module = ast.parse((package / _OPS).read_text())
    wanted = [node for node in module.body if _defines(node) in (_CHOICE, _ALWAYS)]
    found: dict[str, Any] = {
        "torch": torch,
        "functools": functools,
        "_gpu_dispatch_props": lambda device: (multiprocessors, major, minor),
    }
    exec(compile(ast.Module(wanted, []), _OPS, "exec"), found)
    return lambda dtype, rows, *shape: rows <= _MOST_ROWS and found[_CHOICE](0, dtype, rows, *shape)


def _defines(node: ast.stmt) -> str | None:
    """The name that this statement of a module gives a meaning to."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return node.name if isinstance(node, ast.FunctionDef) else None


def _scales_first(launch: Launch, *args: Any, **options: Any) -> None:
    """Scales of blocks are allocated before what they scale.

    Source: quantize_4bit and quantize_blockwise in bitsandbytes/backends/cuda/ops.py.
    """
    launch.results(1, 0)
