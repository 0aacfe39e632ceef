"""An encoded caption."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Text:
    """What a caption is to a transformer: `states` [len, dim] of its tokens, in the dtype of their encoder, and the
    vector `pooled` [pooled_dim] of families that are given one."""

    states: torch.Tensor
    pooled: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its values."""
        return int(self.states.nbytes + (0 if self.pooled is None else self.pooled.nbytes))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Text:
        """The text on `device` in `dtype`."""
        return Text(self.states.to(device, dtype), None if self.pooled is None else self.pooled.to(device, dtype))
