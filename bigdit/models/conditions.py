"""What a model is conditioned on beside latents and t."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Conditions(Protocol):
    """text_embeds [B, T, D] and text_mask [B, T] (1 = token, 0 = padding), None for a model without text;
    `extras`: the further inputs that the family names."""

    @property
    def text_embeds(self) -> torch.Tensor | None: ...

    @property
    def text_mask(self) -> torch.Tensor | None: ...

    @property
    def extras(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Extra:
    """One further input: the shape of a sample's, without the batch; floats come in the compute dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
