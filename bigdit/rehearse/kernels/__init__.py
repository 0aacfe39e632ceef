"""What CUDA kernels give and take, in place of what fake ones do: shapes, strides, masks, attention, reads of data."""

from __future__ import annotations

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""The release of torch, since what kernels do changes with it: (2, 13)."""
