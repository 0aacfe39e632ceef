"""bitsandbytes' paged state without a GPU: it is no memory of torch's CUDA allocator, and counts on the host.

CUDA's managed memory moves between host and card by pages: to the card as the optimizer steps, and back where
the card is full. So the card never runs out because of it, and the host must hold all of it.

Source: get_paged in bitsandbytes/functional.py (0.50.2): a host tensor over memory of cudaMallocManaged; only
states of 100,000 elements or more are paged (Optimizer8bit.get_state_buffer in bitsandbytes/optim/optimizer.py).
"""

from __future__ import annotations

import torch
from bitsandbytes import functional


def page_on_the_host() -> None:
    """Let bitsandbytes take ordinary host memory for managed memory, in this process."""
    functional.get_paged = _get_paged
    functional.fill = _fill
    functional.prefetch_tensor = _stay


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    paged = torch.empty(shape, dtype=dtype)
    paged.is_paged = True
    return paged


def _fill(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


def _stay(tensor: torch.Tensor, to_cpu: bool = False) -> None: ...
