"""CogView4's attention where texts are of several lengths. Source: diffusers' CogView4AttnProcessor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_cogview4 import CogView4AttnProcessor
from torch import nn
from torch.nn import functional as F


class Unpadded(CogView4AttnProcessor):  # type: ignore[misc]
    """The class's own attention, of one sample after another, each with so many `tokens` of its text: also where all
    have as many, so that a plan has the memory of any."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: Sequence[int] = ()

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.tokens) == 1:  # whose padding is cut off
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        samples = zip(hidden_states.split(1), encoder_hidden_states.split(1), self.tokens, strict=True)
        images, texts = zip(
            *(
                super(Unpadded, self).__call__(attn, image, own[:, :n], image_rotary_emb=image_rotary_emb)
                for image, own, n in samples
            ),
            strict=True,
        )
        longest = encoder_hidden_states.shape[1]
        return torch.cat(images), torch.cat([F.pad(own, (0, 0, 0, longest - own.shape[1])) for own in texts])
