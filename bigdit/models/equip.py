"""What a strategy changes in the plain model before an engine takes it."""

from __future__ import annotations

from torch import nn

from bigdit.models.checkpointing import apply_checkpointing
from bigdit.models.family import Family
from bigdit.spec import Strategy


def equip(model: nn.Module, family: Family, strategy: Strategy) -> nn.Module:
    """The model, in place, with the strategy's checkpointing. Raises UserError where it has fewer blocks."""
    apply_checkpointing(model, family, strategy.checkpointed_blocks)
    return model
