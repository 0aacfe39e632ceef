"""The shapes of one sample, taken through a model that has no weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from bigdit.models.family import Family
from bigdit.strategy import BatchShape


def take_through(model: nn.Module, family: Family, sample: BatchShape) -> None:
    """Have the model, which is on the meta device, predict of one `sample`. Raises what the model raises: torch's
    RuntimeError where shapes do not go together, and where values are read, such as a mask's, which there are none."""
    text = sample.text
    with torch.device("meta"), torch.no_grad():
        conditions = SimpleNamespace(
            text_embeds=None if text is None else torch.zeros(1, *text),
            text_mask=None if text is None else torch.ones(1, text[0]),
            extras={
                name: torch.full((1, *each.sample_shape(sample.latents)), each.fill, dtype=each.dtype)
                for name, each in family.extras(model).items()
            },
        )
        family.predict(model, torch.zeros(1, *sample.latents), torch.full((1,), 0.5), conditions)
