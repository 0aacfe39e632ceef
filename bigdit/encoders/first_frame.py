"""First frames for image-to-video models: their latents, and their embeddings by an image encoder.

Source: diffusers 0.42.1, WanImageToVideoPipeline: prepare_latents, encode_image; HunyuanVideo15ImageToVideoPipeline:
prepare_cond_latents_and_mask, _get_image_embeds.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from bigdit.catalog.conditions import IMAGE_EMBEDS, IMAGE_ENCODER
from bigdit.config.data import FirstFrameConfig
from bigdit.encoders.folder import DTYPES, read_config, weights_sample
from bigdit.encoders.protocol import ImageCodec, to_unit_range
from bigdit.errors import UserError
from bigdit.store.part import FIRST_FRAME
from bigdit.store.tensors import config_digest, weights_digest

_KEY = "encoders.first_frame.pipeline"
_SIGLIP = "SiglipVisionModel"
"""The image encoder whose last states models take; of CLIP's they take those before its last layer."""


class FirstFrames:
    """Encodes first frames of videos for a store, in bf16."""

    def __init__(self, config: FirstFrameConfig, codec: ImageCodec, device: torch.device) -> None:
        self._config, self._codec, self._device = config, codec, device
        self.mask, self.color = codec.first_mask, codec.color
        self._encoder: Any = None
        self._processor: Any = None
        if config.pipeline is not None:
            self._encoder, self._processor = self._loaded(config.pipeline)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """As StoreSchema.first_frame: channels of the mask, and the image encoder, with digests of its weights."""
        if self._encoder is None or self._config.pipeline is None:
            return {"mask": self.mask}
        folder = self._config.pipeline / IMAGE_ENCODER
        tokens, dim = self._embeds(torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8)).shape[1:]
        return {
            "mask": self.mask,
            "tokens": tokens,
            "dim": dim,
            "class_name": type(self._encoder).__name__,
            "dtype": self._config.dtype,
            "config": config_digest(read_config(_KEY, folder)),
            "weights": weights_digest(self._encoder.state_dict()),
            "weights_sample": weights_sample(folder, self._config.dtype),
            "processor": config_digest(self._processor.to_dict()),
        }

    def modules(self) -> list[nn.Module]:
        """The image encoder, if any. The codec's modules are its own."""
        return [] if self._encoder is None else [self._encoder]

    def encode(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Latents [B, C, f, h, w] and embeddings [B, tokens, dim], by name, of videos uint8 [B, 1 or 3, F, H, W] or of
        images without F."""
        videos = pixels.unsqueeze(2) if pixels.dim() == 4 else pixels
        found = {FIRST_FRAME: self._codec.encode_first(to_unit_range(videos))}
        if self._encoder is not None:
            found[IMAGE_EMBEDS] = self._embeds(videos)
        return {name: each.to("cpu", torch.bfloat16).contiguous() for name, each in found.items()}

    @torch.no_grad()
    def _embeds(self, videos: torch.Tensor) -> torch.Tensor:
        """Encode one by one, so a frame has the same bytes in any batch."""
        rows = []
        for video in videos:
            image = Image.fromarray(video[:, 0].permute(1, 2, 0).expand(-1, -1, 3).contiguous().numpy())
            given = self._processor(images=image, return_tensors="pt").to(self._device, DTYPES[self._config.dtype])
            if type(self._encoder).__name__ == _SIGLIP:
                rows.append(self._encoder(**given).last_hidden_state)
            else:
                rows.append(self._encoder(**given, output_hidden_states=True).hidden_states[-2])
        return torch.cat(rows)

    def _loaded(self, folder: Path) -> tuple[Any, Any]:
        """Image encoder and processor of the pipeline's folder."""
        from bigdit.encoders.components import load_part, read_index  # transformers takes seconds to import

        index = read_index(_KEY, folder)
        parts = []
        siglip = _SIGLIP in (index.get(IMAGE_ENCODER) or ())
        for name in (IMAGE_ENCODER, "feature_extractor" if siglip else "image_processor"):
            entry = index.get(name)
            if not isinstance(entry, list) or not entry[0]:
                raise UserError(f"{_KEY}: {folder} holds a {index['_class_name']} without {name}")
            parts.append(load_part(_KEY, folder, name, entry, DTYPES[self._config.dtype], self._device))
        return parts[0], parts[1]


def load_first_frames(config: FirstFrameConfig | None, codec: ImageCodec, device: torch.device) -> FirstFrames | None:
    """The encoder of first frames, if the run has one. Raises UserError if it cannot be loaded."""
    return None if config is None else FirstFrames(config, codec, device)
