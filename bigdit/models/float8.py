"""FP8 products of the blocks' linear layers, by torchao's float8 training.

A layer keeps its name, and its weight in the model's dtype. In each pass torchao casts input, weight and gradient to
FP8 by their largest values. On a CPU it rounds to FP8 and multiplies in fp32: same numbers, not faster.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bigdit.errors import UserError
from bigdit.models.family import Family
from bigdit.strategy import Float8, Strategy

MULTIPLE = 16
"""Sizes in FP8 products must be multiples of this. Source: `_scaled_mm` in aten/src/ATen/native/cuda/ScaledBlas.cpp."""

SINCE = (8, 9)
"""The first compute capability that multiplies in FP8. Source: `_scaled_mm_allowed_device` there."""

_NOT_OF_TOKENS = re.compile(r"\b(\w*norm\w*|\w*mod|\w*modulation\w*|experts|lora_[AB])\b", re.IGNORECASE)
"""Parts of the names of layers with one row per sample, layers of experts, and adapters."""


def use_float8(model: nn.Module, family: Family, recipe: Float8) -> None:
    """Replace the linear layers for tokens in the blocks, if their sizes are multiples of 16.

    Raises UserError if no layer is left, or if torchao is missing.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # it takes seconds to import
    except ImportError as error:
        raise UserError(f"strategy.float8 is {recipe}, and torchao cannot be imported: {error}; install it") from None
    # For the weight's gradient the inner size is the number of tokens: it is padded.
    emulate = not torch.cuda.is_available()
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate)
    for block in family.blocks(model):
        convert_to_float8_training(block, config=config, module_filter_fn=_takes_float8)
    if recipe == "rowwise":
        for layer in filter(_is_float8, model.modules()):
            layer.register_forward_pre_hook(_contiguous)
    count, of = float8_count(model, family)
    if not count:
        raise UserError(
            f"strategy.float8 is {recipe}, and {MULTIPLE} divides the sizes of none of the {of} linear layers of the "
            "blocks; leave float8 out"
        )


def check_gpu(strategy: Strategy, device: torch.device) -> None:
    """Raise UserError for a GPU without FP8."""
    if strategy.float8 == "none" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < SINCE:
        found, needed = (".".join(map(str, each)) for each in (capability, SINCE))
        raise UserError(
            f"strategy.float8 is {strategy.float8}, and {torch.cuda.get_device_name(device)} multiplies nothing in FP8 "
            f"(compute capability {found}), which needs {needed} or more; set it to none"
        )


def _contiguous(layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Make the input contiguous: torchao cannot change the layout of a tensor with a scale per row."""
    return (inputs[0].contiguous(),)


def _takes_float8(layer: nn.Module, name: str) -> bool:
    # A subclass may compute something else.
    if type(layer) is not nn.Linear or not of_tokens(name):
        return False
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


def of_tokens(name: str) -> bool:
    """Whether the layer of that name in a block sees all tokens of a sample."""
    return _NOT_OF_TOKENS.search(name) is None


def float8_count(model: nn.Module, family: Family) -> tuple[int, int]:
    """The number of the blocks' linear layers in FP8, and of all of them without adapters."""
    linears = [
        layer
        for block in family.blocks(model)
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and "lora_" not in name
    ]
    return sum(map(_is_float8, linears)), len(linears)


def float8_notices(model: nn.Module, family: Family, strategy: Strategy) -> list[str]:
    """What to log about FP8, before the first step."""
    if strategy.float8 == "none":
        return []
    count, of = float8_count(model, family)
    slow = "" if torch.cuda.is_available() else "; a CPU only rounds to FP8, which makes nothing faster"
    return [f"strategy.float8: {count} of the {of} linear layers of the blocks multiply in FP8{slow}"]


def _is_float8(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Float8Linear"


def gather_in_float8(layer: nn.Module) -> None:
    """Make FSDP2 cast the layer's shards to FP8, with one scale per weight, and gather one byte per element."""
    if _is_float8(layer):
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        weight, dtype = layer.weight, layer.config.cast_config_weight.target_dtype
        cast = WeightWithDynamicFloat8CastTensor(weight.detach(), layer.linear_mm_config, dtype)
        layer.weight = nn.Parameter(cast, requires_grad=weight.requires_grad)


def plain_rows(weight: DTensor) -> torch.Tensor:
    """This process's rows of the weight, without what casts them to FP8."""
    rows = weight.to_local()
    return getattr(rows, "_tensor", rows)


_FLOAT8 = (
    *("config.CastConfig", "config.Float8GemmConfig", "config.Float8LinearConfig"),
    *("float8_training_tensor.LinearMMConfig", "float8_training_tensor.ScaledMMConfig"),
)
_PRODUCT = "matmul_with_hp_or_float8_args"


def keep_float8() -> None:
    """Let torch cache the traces of torchao's FP8 functions, keyed by torchao's version. By default it caches only
    kernels, and tracing again takes three times as long."""
    from torch._dynamo.variables import misc

    produce = getattr(misc, "produce_trampoline_autograd_apply", None)
    if produce is None:
        return  # another torch: it traces again
    named = [f"torchao.float8.{name}" for name in _FLOAT8]
    safe = dict.fromkeys([*named, f"{misc.__name__}.{_PRODUCT}"], version("torchao"))
    torch._inductor.config.unsafe_marked_cacheable_functions = safe

    @functools.cache
    def findable(function: Any) -> Any:
        """The function by which torch calls one of autograd, with a name, so that it can be in a key of the cache."""
        apply = produce(function)
        apply.__name__ = apply.__qualname__ = function.__name__
        apply._origin = findable  # type: ignore[attr-defined]
        setattr(misc, function.__name__, apply)
        return apply

    misc.produce_trampoline_autograd_apply = findable
