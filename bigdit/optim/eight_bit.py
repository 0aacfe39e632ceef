"""Optimizer state in 8 bits, quantised in blocks (Dettmers et al., arXiv:2110.02861), by bitsandbytes' kernels."""

from __future__ import annotations

import torch

from bigdit import libraries
from bigdit.optim.factored import State

BLOCK = 256  # elements that share an fp32 scale: 1 + 4 / 256 B an element
SMALLEST = 4096  # fewer elements stay in fp32, as in bitsandbytes


class EightBitStates:
    """Keeps fp32 states as `<name>` uint8 and `<name>_absmax`; where it is off, and of small tensors, as they are."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._maps: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def start(self, state: State, name: str, like: torch.Tensor) -> None:
        """A zero state of the shape of fp32 `like`."""
        if not self._on or like.numel() < SMALLEST:
            state[name] = torch.zeros_like(like)
            return
        # Scales of zero make the values zero, whatever their codes are.
        state[name] = torch.zeros_like(like, dtype=torch.uint8)
        state[f"{name}_absmax"] = like.new_zeros(-(-like.numel() // BLOCK))

    def fetch(self, state: State, name: str, *, signed: bool) -> torch.Tensor:
        """The state in fp32: itself, or a copy which counts once it is handed to `keep`."""
        absmax = state.get(f"{name}_absmax")
        if absmax is None:
            return state[name]
        code = self._map(absmax.device, signed)
        return torch.ops.bitsandbytes.dequantize_blockwise(state[name], absmax, code, BLOCK, torch.float32)

    def keep(self, state: State, name: str, value: torch.Tensor, *, signed: bool) -> None:
        """Put a changed `fetch` back."""
        absmax = state.get(f"{name}_absmax")
        if absmax is not None:
            codes, scales = torch.ops.bitsandbytes.quantize_blockwise(value, self._map(absmax.device, signed), BLOCK)
            state[name].copy_(codes)
            absmax.copy_(scales)

    def _map(self, device: torch.device, signed: bool) -> torch.Tensor:
        """The 256 values that codes stand for, dense near zero (§1.3 of the paper)."""
        if (device, signed) not in self._maps:
            with libraries.uncompiled():
                from bitsandbytes.functional import create_dynamic_map  # late: bitsandbytes probes CUDA

            self._maps[device, signed] = create_dynamic_map(signed=signed).to(device)
        return self._maps[device, signed]
