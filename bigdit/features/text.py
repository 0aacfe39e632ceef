"""An encoded caption, and what every text encoder offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bigdit.config.run import TextEncoderConfig
from bigdit.features.batch_size import CPU_BATCH


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


class TextEncoder(Protocol):
    """`dim` of the states and `pooled_dim` of the vector, None where there is none; the most states of a caption."""

    dim: int
    pooled_dim: int | None
    max_tokens: int

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes these texts from those of another encoder: a JSON object."""
        ...

    def encode(self, captions: Sequence[str]) -> list[Text]:
        """Captions to their texts, on the encoder's device."""
        ...

    def null(self) -> Text:
        """The text that guidance leads away from (Ho & Salimans, arXiv:2207.12598): that of no caption."""
        ...


def load_text_encoder(
    config: TextEncoderConfig, device: torch.device | str = "cpu", batch_size: int = CPU_BATCH
) -> TextEncoder:
    """The text encoder that a run names, on `device`, for at most `batch_size` captions at once.

    Raises UserError where it cannot be loaded.
    """
    # Only here: transformers and diffusers take seconds to import.
    if config.pipeline is not None:
        from bigdit.features.encoders.pipeline import PipelineTextEncoder

        return PipelineTextEncoder(config, device, batch_size)
    from bigdit.features.encoders.text import T5TextEncoder

    return T5TextEncoder(config, device, batch_size)
