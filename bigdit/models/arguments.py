"""What a diffusers model was constructed with."""

from __future__ import annotations

from typing import Any

from torch import nn


def arguments(model: nn.Module) -> Any:
    """The model's constructor arguments as attributes, also behind DeepSpeed's wrapper, whose `config` is its own."""
    return getattr(model, "module", model).config
