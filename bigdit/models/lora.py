"""Low-rank adapters by peft, over a frozen base in bf16, int8, fp8 or nf4; the base of a ControlNet.

A base is quantised when it moves to its device. int8 and fp8 have a scale for each row (`ScaledLinear`). nf4 is
bitsandbytes' 4-bit NormalFloat with an fp32 scale for 64 values (Dettmers et al., arXiv:2305.14314, without double
quantisation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn
from torch.nn import functional as F

from bigdit.errors import UserError, nearest
from bigdit.models.family import Family
from bigdit.models.lora_files import ADAPTER, TEXT_ENCODERS, TEXT_TARGETS, last_name, patterns, principal
from bigdit.strategy import LoraSpec, fits


def apply_lora(model: nn.Module, family: Family, spec: LoraSpec, *, seed: int) -> None:
    """Freeze the model, add trainable adapters in its dtype, and quantise the linear layers of its blocks.

    `spec.base` bf16 leaves the base in the model's dtype. The adapters' values are drawn from `seed` in fp32, the same
    on all processes. Raises UserError if a target names no linear layer.
    """
    dtype = next(model.parameters()).dtype
    targets = _targets(model, family, spec)
    for rule in spec.ranks:
        if not any(fits(name, rule) for name in targets):
            known = any(fits(name, rule) for name in _linears(model))
            missing = f"name {rule!r} in strategy.lora.targets, with the others to adapt"
            fix = missing if known else _hint(rule, targets)
            raise UserError(f"strategy.lora.ranks: no adapted layer's name ends in {rule!r}; {fix}")
    model.requires_grad_(False)
    if spec.base != "bf16":
        quantise(family.blocks(model), spec.base)
    # peft reads it to choose layers that wrap bitsandbytes'.
    model.is_loaded_in_4bit = spec.base == "nf4"  # type: ignore[assignment]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        packed = spec.base != "bf16"  # its norms are known to peft only after it has moved
        inject_adapter_in_model(_config(spec, targets, dora=spec.dora and not packed), model, ADAPTER)
    for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
        if spec.pissa:
            _start_principal(layer, spec)
        if spec.dora and packed:
            _add_magnitudes(layer, spec.base)
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        parameter.data = parameter.data.to(dtype)  # peft leaves them in fp32 over quantised weights


def adapt_text(model: nn.Module, encoders: Mapping[str, nn.Module], spec: LoraSpec, *, seed: int) -> None:
    """Add adapters to the attention of CLIP encoders, and make the encoders part of the model, to train them with it.

    `encoders`: by their names in a pipeline. Adapters have the encoders' dtype. diffusers' scripts adapt the same
    layers.
    """
    inner = nn.ModuleDict()
    for name, encoder in encoders.items():
        clip = getattr(encoder, "text_model", encoder)  # only some versions of transformers have it
        dtype = next(clip.parameters()).dtype
        clip.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            scale = {"lora_alpha": spec.alpha, "use_rslora": spec.rslora}
            config = LoraConfig(r=spec.rank, target_modules=[*TEXT_TARGETS], **scale)  # type: ignore[arg-type]
            inject_adapter_in_model(config, clip, ADAPTER)
        for parameter in (each for each in clip.parameters() if each.requires_grad):
            parameter.data = parameter.data.to(dtype)
        inner[name] = clip
    setattr(model, TEXT_ENCODERS, inner)


def quantise(blocks: Sequence[nn.Module], base: str) -> None:
    """Make the frozen linear layers of these blocks quantise their weights when they move to a device."""
    for block in blocks:
        for name, linear in list(block.named_modules()):
            if isinstance(linear, nn.Linear):
                block.set_submodule(name, _quantised(linear, base))


def _config(spec: LoraSpec, targets: list[str], *, dora: bool) -> PeftConfig:
    shared: dict[str, Any] = {"r": spec.rank, "target_modules": targets, **patterns(spec, targets)}
    if spec.kind == "lora":
        return LoraConfig(lora_alpha=spec.alpha, use_dora=dora, use_rslora=spec.rslora, **shared)  # type: ignore[arg-type]
    return (LoKrConfig if spec.kind == "lokr" else LoHaConfig)(alpha=spec.alpha, **shared)  # type: ignore[arg-type]


def _targets(model: nn.Module, family: Family, spec: LoraSpec) -> list[str]:
    """The full names of the linear layers to adapt: those that match a target, or those of attention."""
    linears = _linears(model)
    if not spec.targets:
        blocks = set(family.blocks(model))
        inside = tuple(f"{name}." for name, module in model.named_modules() if module in blocks)
        found = [name for name in linears if name.startswith(inside) and _is_of_attention(name)]
        if not found:
            raise UserError(
                "strategy.lora.targets is empty, and no linear layer of the blocks is one of attention; name some"
            )
        return found
    for target in spec.targets:
        if not any(fits(name, target) for name in linears):
            hint = _hint(target, linears)
            raise UserError(f"strategy.lora.targets: no linear layer's name ends in {target!r}; {hint}")
    return [name for name in linears if any(fits(name, target) for target in spec.targets)]


def _linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _hint(rule: str, layers: Sequence[str]) -> str:
    """A pattern, if layers have the rule within their names; else the nearest of their last names."""
    for within in (f"*.{rule}.*", f"{rule}.*"):
        if any(fits(each, within) for each in layers):
            return f"did you mean {within!r}?"
    return nearest(rule, {last_name(each) for each in layers})


def _is_of_attention(name: str) -> bool:
    parents = name.split(".")[:-1]
    return any("attn" in part or "attention" in part for part in parents) and not any("norm" in p for p in parents)


def _start_principal(layer: Any, spec: LoraSpec) -> None:
    """Start from the weight's principal part, and keep the rest in the weight, which is quantised later."""
    weight, rank = layer.get_base_layer().weight, layer.r[ADAPTER]
    if weight.is_meta:
        return
    down, up = principal(weight.data, rank, spec.scale(rank))
    layer.lora_A[ADAPTER].weight.data.copy_(down)
    layer.lora_B[ADAPTER].weight.data.copy_(up)
    weight.data = (weight.data - spec.scale(rank) * (up @ down)).to(
        weight.dtype
    )  # not in place: it may be mapped from a file


def _add_magnitudes(layer: Any, base: str) -> None:
    """Add DoRA's magnitudes, the norms of the rows of its weight, to a LoraLayer. Only weights of blocks are quantised.
    Source: peft's DoraLinearVariant.init."""
    linear = layer.get_base_layer()
    weight = linear.weight.data
    magnitudes = _PackedDora(fan_in_fan_out=False)
    kept = base if isinstance(linear, ScaledLinear | Linear4bit) else "bf16"
    magnitudes.weight = nn.Parameter(_norms(weight, kept).to(weight.dtype))
    layer.adapter_layer_names = (*layer.adapter_layer_names, "lora_magnitude_vector")
    layer.lora_magnitude_vector[ADAPTER] = magnitudes
    layer.lora_variant[ADAPTER] = DoraLinearVariant()
    layer.use_dora[ADAPTER] = True


class _PackedDora(DoraLinearLayer):
    """DoRA over a quantised weight, which it dequantises; peft itself does not know ScaledLinear."""

    def forward(self, x: torch.Tensor, *, base_layer: Any, **rest: Any) -> torch.Tensor:
        if isinstance(base_layer, ScaledLinear):
            weight = dequantised(base_layer.weight, base_layer.scale)
        elif isinstance(base_layer, Linear4bit):
            weight = dequantize_4bit(base_layer.weight.data, base_layer.weight.quant_state)
        else:
            weight = base_layer.weight.data
        unpacked = SimpleNamespace(weight=nn.Parameter(weight, requires_grad=False), bias=base_layer.bias)
        return super().forward(x, base_layer=unpacked, **rest)


def _norms(weight: torch.Tensor, base: str) -> torch.Tensor:
    """The norms [rows], fp32, of a weight as its layer will keep it.

    For int8 they are those before quantisation, which would take a CPU minutes. With rows of 3,072 the difference is at
    most 3e-3, about that of rounding to bf16.
    """
    if base == "nf4" and not weight.is_meta:
        weight = dequantize_4bit(*quantize_4bit(weight, compress_statistics=False, quant_type="nf4"))
    if base == "fp8" and not weight.is_meta:
        weight = dequantised(*quantised(weight, SCALED[base]))
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)


def _quantised(linear: nn.Linear, base: str) -> nn.Linear:
    """A layer with the same weight, which is quantised when it moves to a device."""
    if base in SCALED:
        return ScaledLinear(linear, SCALED[base])
    layer = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compress_statistics=False,
        quant_type="nf4",
        device="meta",
    )
    # In eval mode some CPUs would repack it, with other numbers, if rows have 64 or more elements.
    layer.support_avx512bf16_for_cpu = False
    layer.weight = Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4", module=layer
    )
    layer.bias = linear.bias
    return layer


SCALED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Bases with a scale for each row."""


class ScaledLinear(nn.Linear):
    """Replaces a frozen `linear`, and quantises its weight when it moves to a device.

    `weight` is then [out, in] in the dtype `kept`, and `scale` [out, 1] in the dtype that the weight had.
    """

    def __init__(self, linear: nn.Linear, kept: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.kept = kept
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = nn.Parameter(linear.weight.new_empty(linear.out_features, 1), requires_grad=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.weight.dtype != self.kept and not self.weight.is_meta:
            weight, scale = quantised(self.weight.data, self.kept)
            self.weight, self.scale = (nn.Parameter(each, requires_grad=False) for each in (weight, scale))
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(input, self.weight, self.scale, self.bias)
        return product


class _Product(torch.autograd.Function):
    """F.linear of a weight that is dequantised in the forward pass and again in the backward pass.

    Otherwise autograd would keep the dequantised weight in between.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(input, dequantised(weight, scale), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient @ dequantised(*ctx.saved_tensors), None, None, None


def quantised(weight: torch.Tensor, kept: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] in the dtype `kept`, and a scale for each row [rows, 1] in the weight's dtype."""
    most = torch.finfo(kept).max if kept.is_floating_point else torch.iinfo(kept).max
    largest = torch.linalg.vector_norm(weight, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    scale = (largest / most).to(weight.dtype)
    scale = scale.masked_fill_(scale == 0, 1)
    # Divided by the rounded scale, so that its rounding adds no error.
    values = weight.float() / scale
    values = (values if kept.is_floating_point else values.round_()).clamp_(-most, most)
    return values.to(kept), scale


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[rows, columns] in the dtype of the scales; of int8 by one kernel, without a copy in between."""
    if weight.dtype == torch.float8_e4m3fn:  # which torch does not multiply with another dtype
        return weight.to(scale.dtype).mul_(scale)
    return weight * scale
