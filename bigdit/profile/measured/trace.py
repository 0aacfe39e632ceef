"""The operators behind an allocation, read from its stack."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_OPERATOR = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)")
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+)::(?:apply|operator\(\))")
_EMULATOR = "/bigdit/emulator/"
"""Its functions stand around the kernels whose small results it computes."""
_MAKERS = ("empty", "resize_")
"""How operators' names begin that make a tensor for others."""


def operator(frames: Iterable[Mapping[str, Any]]) -> str:
    """The operators of a stack of C++ and Python, the innermost first, and the autograd node or function around them.

    `sum_dim_IntList < convolution_backward in ConvolutionBackward0`; empty where there is no stack.
    """
    operators: list[str] = []
    for frame in frames:
        name = frame["name"]
        if match := _OPERATOR.search(name):
            if match[1] not in operators:
                operators.append(match[1])
        elif (node := _NODE.search(name)) and node[1] not in ("Node", "Engine"):
            return f"{_chain(operators)} in {node[1]}"
        elif frame["filename"].endswith(".py") and _EMULATOR not in frame["filename"]:
            return f"{_chain(operators)} in {frame['filename'].rsplit('/', 1)[-1]}:{name}"
    return _chain(operators)


def _chain(operators: list[str]) -> str:
    """The innermost that is more than the making of a tensor, and the outermost."""
    telling = [name for name in operators if not name.startswith(_MAKERS)] or operators[:1]
    return " < ".join(dict.fromkeys([*telling[:1], *telling[-1:]]))
