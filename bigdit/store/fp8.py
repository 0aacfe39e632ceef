"""Hidden states in half the bytes of bf16: 8-bit floats (e4m3), with a scale for each token.

Source: Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433): e4m3 has 3 bits of mantissa and 448 as
its largest value. Rounding to the nearest errs by at most 2⁻⁴ of a normal value, and by 2⁻¹⁰ of the scale near zero.
Measured: 2.6 % of a token's state, by its norm, both of T5's states (benchmarks/README.md) and of normal
numbers.
"""

from __future__ import annotations

import torch

DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(DTYPE).max  # 448


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [len, dim] as e4m3 [len, dim] and fp32 scales [len], such that a token's largest value is e4m3's."""
    wide = states.float()
    scale = wide.abs().amax(dim=1) / _LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a token of zeros
    return (wide / scale[:, None]).clamp(-_LARGEST, _LARGEST).to(DTYPE), scale


def dequantise(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The states [len, dim] in `dtype` of e4m3 values [len, dim] and fp32 scales [len]."""
    return (values.float() * scale[:, None]).to(dtype)
