"""cuBLAS and cuBLASLt: one workspace for each handle and stream, which stays, or since torch 2.15 does not.

Shown by the referee's row of Sana on an A40, engine single.
"""

from __future__ import annotations

from typing import Any

import torch

from bigdit.rehearse.kernels import TORCH
from bigdit.rehearse.scratch.launch import Launch, Rule
from bigdit.units import KIB, MIB

aten = torch.ops.aten

_BIASED = (aten.addmm.default, aten._addmm_activation.default)
_PRODUCTS = (
    *(aten.mm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.mv.default, aten.addmv.default, aten.dot.default),
)

_LT_APART = TORCH < (2, 12)
"""Whether cuBLASLt has a workspace beside cuBLAS. Source: traces of torch 2.11.0, 2.13.0, 2.15.0 on emulated cards."""

_STAYS = TORCH < (2, 15)
"""Whether workspaces stay when a product is done. Source: as of _LT_APART."""

LT_BYTES = MIB
"""cuBLASLt's own workspace. Source: as of _LT_APART, on an A40 and an H100; CUBLASLT_WORKSPACE_SIZE's default."""


class Workspaces:
    """Those of one process. Source: getCurrentCUDABlasHandle in aten/src/ATen/cuda/CublasHandlePool.cpp."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, bool, int], list[torch.Tensor]] = {}

    def product(self, launch: Launch, *args: Any, **options: Any) -> None:
        """A matrix product: its result first, and then the workspace, if there was none yet."""
        launch.results()
        self.hold(launch)

    def biased(self, launch: Launch, bias: torch.Tensor, *args: Any, **options: Any) -> None:
        """A product with a bias, which cuBLASLt adds where it is a row; else as `product`."""
        launch.results()
        if bias.dim() != 1 or _STAYS:
            self.hold(launch)
        if bias.dim() == 1 and (_LT_APART or not _STAYS):
            self._take("cuBLASLt", launch, LT_BYTES)

    def hold(self, launch: Launch) -> None:
        """The workspace of this handle and stream is there now, and from now on where it stays."""
        self._take("cuBLAS", launch, cublas_workspace_bytes(launch.card.compute_capability))

    def rules(self) -> dict[Any, Rule]:
        """Those of the products."""
        return dict.fromkeys(_PRODUCTS, self.product) | dict.fromkeys(_BIASED, self.biased)

    def _take(self, library: str, launch: Launch, nbytes: int) -> None:
        if not _STAYS:
            launch.briefly(nbytes)
            return
        # The thread of the backward pass has a handle of its own.
        in_backward = torch._C._current_graph_task_id() != -1
        key = (library, in_backward, torch.get_device_module(launch.card.device.type).current_stream().stream_id)
        if key not in self._taken:
            self._taken[key] = launch.take([nbytes])


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """The workspace of one cuBLAS handle on one stream.

    Source: parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on sm_90, sm_100 and
    sm_120, and 2 × 4096 KiB + 8 × 16 KiB elsewhere, torch 2.11 to 2.15.
    """
    return 32 * MIB if compute_capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * KIB
