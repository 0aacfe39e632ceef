"""cuBLAS and cuBLASLt: one workspace for each handle and stream, which stays."""

from __future__ import annotations

from typing import Any

import torch

from bigdit.rehearse.scratch.launch import Launch, Rule
from bigdit.units import KIB, MIB

aten = torch.ops.aten

_PRODUCTS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._addmm_activation.default),
    *(aten.mv.default, aten.addmv.default, aten.dot.default),
)


class Workspaces:
    """Those of one process. Source: getCurrentCUDABlasHandle in aten/src/ATen/cuda/CublasHandlePool.cpp."""

    def __init__(self) -> None:
        self._taken: dict[tuple[bool, int], list[torch.Tensor]] = {}

    def product(self, launch: Launch, *args: Any, **options: Any) -> None:
        """A matrix product: its result first, and then the workspace, if there was none yet."""
        launch.results()
        self.hold(launch)

    def hold(self, launch: Launch) -> None:
        """The workspace of this handle and stream is there from now on."""
        # The thread of the backward pass has a handle of its own. cuBLASLt shares the workspace.
        in_backward = torch._C._current_graph_task_id() != -1
        key = (in_backward, torch.get_device_module(launch.card.device.type).current_stream().stream_id)
        if key not in self._taken:
            self._taken[key] = launch.take([cublas_workspace_bytes(launch.card.compute_capability)])

    def rules(self) -> dict[Any, Rule]:
        """Those of the products."""
        return dict.fromkeys(
            (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), self.product
        )


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """The workspace of one cuBLAS handle on one stream.

    Source: parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on sm_90, sm_100 and
    sm_120, and 2 × 4096 KiB + 8 × 16 KiB elsewhere, torch 2.11 to 2.13.
    """
    return 32 * MIB if compute_capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * KIB
