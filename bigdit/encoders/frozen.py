"""Frozen encoders with random weights, for emulated steps of online training and of extraction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from bigdit.catalog.encoders import POOLED_TEXT, OnlineEncoders, TextEncoderSpec
from bigdit.catalog.families import mask_of
from bigdit.encoders.latents import encode_latents, one_by_one
from bigdit.encoders.protocol import EncodedBatch, is_clip, to_unit_range

Texts = tuple[torch.Tensor | None, torch.Tensor | None, dict[str, torch.Tensor]]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FrozenEncoders:
    """A VAE and text encoders with random weights, in eval mode, without gradients, in CPU memory."""

    def __init__(self, spec: OnlineEncoders) -> None:
        self.spec = spec
        self._vae = one_by_one(_frozen(getattr(diffusers, spec.vae.class_name)(**spec.vae.kwargs), spec.vae.dtype))
        if spec.vae.tiling:
            self._vae.enable_tiling()
        self._text = [_text_encoder(encoder) for encoder in spec.text]
        self.trained = False

    def to(self, device: torch.device) -> None:
        """Move all of them to `device`."""
        for module in self.modules():
            module.to(device)

    def modules(self) -> list[nn.Module]:
        """The VAE and the text encoders."""
        return [*self.of_images(), *self.of_texts()]

    def of_images(self) -> list[nn.Module]:
        """The VAE."""
        return [self._vae]

    def of_texts(self) -> list[nn.Module]:
        """The text encoders."""
        return list(self._text)

    def clips(self) -> dict[str, nn.Module]:
        """The CLIP encoders, by their names in a pipeline, where they come first."""
        found = [each for each in self._text if is_clip(each)]
        return {f"text_encoder_{i}" if i > 1 else "text_encoder": each for i, each in enumerate(found, 1)}

    def tensors(self) -> list[torch.Tensor]:
        """All weights and buffers."""
        return [tensor for module in self.modules() for tensor in (*module.parameters(), *module.buffers())]

    def encode(self, pixels: torch.Tensor, tokens: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> EncodedBatch:
        """Encode pixels [B, 3, (F,) H, W] uint8, and (ids, mask) [B, T] int64 for each text encoder, on its device."""
        return EncodedBatch(self.latents(pixels), *self.texts(tokens))

    @torch.no_grad()
    def latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """The latents of pixels, as in `encode`."""
        return encode_latents(self._vae, to_unit_range(pixels).to(self._vae.dtype)).float()

    def texts(self, tokens: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Texts:
        """The states, mask and extras of the text encoders, as in EncodedBatch."""
        texts: list[tuple[torch.Tensor, torch.Tensor]] = []
        pooled: list[torch.Tensor] = []
        extras: dict[str, torch.Tensor] = {}
        for spec, model, (ids, mask) in zip(self.spec.text, self._text, tokens, strict=True):
            with torch.set_grad_enabled(self.trained and is_clip(model)):
                states, shown, vector = _read(spec, model, ids, mask)
            if vector is not None:
                pooled.append(vector)
            if states is not None and spec.stream is not None:
                extras |= {spec.stream: states, mask_of(spec.stream): shown.to(states.dtype)}
            elif states is not None:
                texts.append((states, shown))
        if pooled:
            extras[POOLED_TEXT] = torch.cat(pooled, dim=1)
        return *_joined(texts), extras


def _text_encoder(spec: TextEncoderSpec) -> nn.Module:
    config = getattr(transformers, spec.config_class)(**spec.kwargs)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values are not used again
    return _frozen(getattr(transformers, spec.class_name)(config), spec.dtype)


def _frozen(module: nn.Module, dtype: str) -> Any:
    # nn.Module's own `to`: diffusers' override warns about fp32 modules, which these classes do not have.
    return nn.Module.to(module, _DTYPES[dtype]).eval().requires_grad_(False)


def _read(
    spec: TextEncoderSpec, model: nn.Module, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Hidden states [B, T, D] without the template ([B, L T, D] for layers in rows), mask, and pooled vector [B, D]."""
    found = model(input_ids=ids, attention_mask=mask, output_hidden_states=bool(spec.layers))
    states = pooled = None
    if spec.gives != "states":  # models with a projection name the pooled vector text_embeds
        pooled = found.text_embeds if "text_embeds" in found else found.pooler_output
    if spec.gives != "pooled":
        states = _states(spec, found)
    shown = mask[:, _own(spec)]
    return states, shown.repeat(1, len(spec.layers)) if spec.in_rows else shown, pooled


def _states(spec: TextEncoderSpec, found: Any) -> torch.Tensor:
    """The hidden states of the spec's layers, without the template."""
    if not spec.layers:
        return found.last_hidden_state[:, _own(spec)]
    layers = [found.hidden_states[layer] for layer in spec.layers]
    if spec.in_rows:
        return torch.cat([layer[:, _own(spec)] for layer in layers], dim=1)
    return torch.cat(layers, dim=2)[:, _own(spec)]


def _own(spec: TextEncoderSpec) -> slice:
    """The places of a caption's tokens within its template."""
    return slice(spec.skip, -spec.cut or None)


def _joined(texts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """One sequence from the sequences of all encoders, as in OnlineEncoders."""
    if not texts:
        return None, None
    parts = [list(group) for _, group in groupby(texts, key=lambda text: text[1].shape[1])]
    states = [torch.cat([state for state, _ in part], dim=2) if len(part) > 1 else part[0][0] for part in parts]
    widest = max(state.shape[2] for state in states)
    states = [F.pad(state, (0, widest - state.shape[2])) if state.shape[2] < widest else state for state in states]
    masks = [part[0][1].to(states[0].dtype) for part in parts]
    if len(parts) == 1:
        return states[0], masks[0]
    return torch.cat(states, dim=1), torch.cat(masks, dim=1)
