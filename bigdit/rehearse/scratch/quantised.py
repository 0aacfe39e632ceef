"""Products of quantised weights, by bitsandbytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bigdit.rehearse.scratch.blas import Workspaces
from bigdit.rehearse.scratch.launch import Launch, Rule


class QuantisedProducts:
    """By name: these operators exist once bitsandbytes is imported."""

    def __init__(self, workspaces: Workspaces) -> None:
        self._workspaces = workspaces

    def by_name(self) -> dict[str, Rule]:
        """The rule of each operator."""
        return {
            "bitsandbytes.gemm_4bit.default": self._gemm_4bit,
            "bitsandbytes.int8_scaled_mm.default": _int8_scaled_mm,
        }

    def _gemm_4bit(
        self, launch: Launch, input: torch.Tensor, packed: torch.Tensor, shape: Sequence[int], *rest: Any
    ) -> None:
        """The weight in the input's dtype, for torch's own product.

        So it is above 1536 rows (samples × tokens); below, a table by card and shape may choose a kernel that takes
        nothing, and this is then the most that it could be. Source: gemm_4bit in bitsandbytes/backends/cuda/ops.py.
        """
        with launch.holding(math.prod(shape) * input.element_size()):
            self._workspaces.product(launch)


def _int8_scaled_mm(
    launch: Launch,
    rows: torch.Tensor,
    columns: torch.Tensor,
    *rest: Any,
    dtype: torch.dtype = torch.float16,
    **options: Any,
) -> None:
    """The product in int32, and scaled in fp16 where that is not the result.

    Source: int8_scaled_mm and int8_mm_dequant in bitsandbytes/backends/default/ops.py and backends/cuda/ops.py.
    """
    count = rows.numel() // rows.shape[-1] * columns.shape[0]
    with launch.holding(*([4 * count] if dtype == torch.float16 else [4 * count, 2 * count])):
        launch.results()
