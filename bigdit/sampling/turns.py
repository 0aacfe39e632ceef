"""Models that have a device in turn: what one took is given back before the next one comes."""

from __future__ import annotations

import gc

import torch


def give_back(device: torch.device) -> None:
    """Have the device get back what nothing holds any more: of pipelines parts hold each other, and torch's allocator
    keeps what was freed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
