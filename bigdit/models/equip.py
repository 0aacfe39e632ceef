"""What a strategy changes in the plain model before an engine takes it."""

from __future__ import annotations

from torch import nn

from bigdit import libraries
from bigdit.models.activations import offload_activations
from bigdit.models.checkpointing import apply_checkpointing
from bigdit.models.compiling import compile_blocks
from bigdit.models.family import Family
from bigdit.models.pieces import join_gradients
from bigdit.models.swap import swap_blocks
from bigdit.spec import Strategy


def equip(
    model: nn.Module, family: Family, strategy: Strategy, *, seed: int = 0, backend: str = "inductor"
) -> nn.Module:
    """The model, in place, with the strategy's adapters, compiled or swapped blocks, checkpointing and offload of
    activations.

    `seed` is that of the adapters' values, `backend` torch's compiler. Raises UserError where it has fewer blocks than
    are to be swapped or checkpointed, or a target of the adapters is none of its linear layers.
    """
    if strategy.lora is not None:
        with libraries.uncompiled():
            from bigdit.models.lora import apply_lora  # peft and bitsandbytes take seconds to import

        apply_lora(model, family, strategy.lora, seed=seed)
    if strategy.compile_blocks:
        compile_blocks(model, family, backend)
    if strategy.blocks_to_swap:
        swap_blocks(model, family, strategy.blocks_to_swap, trained=strategy.lora is None)
    join_gradients(model, family)
    apply_checkpointing(model, family, strategy.checkpointed_blocks, strategy.checkpointing)
    if strategy.offload_activations:
        offload_activations(model, family)
    return model
