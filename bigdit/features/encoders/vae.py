"""Image codecs from diffusers: a VAE in a folder, its latents scaled and shifted as its config says."""

from __future__ import annotations

import diffusers
import torch

from bigdit.config.run import VaeCodec
from bigdit.errors import UserError
from bigdit.features.buckets import Color
from bigdit.features.digest import config_digest, weights_digest
from bigdit.features.encoders.folder import check_complete, read_config
from bigdit.features.encoders.latents import encode_latents

_KEY = "encoders.image.path"


class DiffusersVae:
    """AutoencoderKL (the mode of its distribution) or AutoencoderDC, in fp32.

    latents = (z − shift_factor) × scaling_factor. Source: diffusers, StableDiffusion3Pipeline and SanaPipeline.
    """

    stored_dtype = torch.bfloat16

    def __init__(self, config: VaeCodec, device: torch.device | str) -> None:
        saved = read_config(_KEY, config.path)
        if saved.get("_class_name") != config.class_name:
            raise UserError(
                f"{_KEY}: {config.path} holds a {saved.get('_class_name')}, and "
                f"encoders.image.class_name is {config.class_name}"
            )
        for statistic in ("latents_mean", "latents_std"):
            if saved.get(statistic) is not None:
                raise UserError(f"{_KEY}: {config.path} normalises by {statistic}, which bigdit does not apply")
        self._vae = _load(config).to(device)
        self._device = torch.device(device)
        self._scale = float(self._vae.config.scaling_factor)
        self._shift = float(self._vae.config.get("shift_factor") or 0.0)
        self.channels = int(self._vae.config.latent_channels)
        levels = self._vae.config.get("block_out_channels") or self._vae.config.encoder_block_out_channels
        self.downsample = 2 ** (len(levels) - 1)
        self.color: Color = "gray" if self._vae.config.in_channels == 1 else "rgb"
        self.identity = {
            "name": "vae",
            "class_name": config.class_name,
            "config": config_digest(saved),
            "weights": weights_digest(self._vae.state_dict()),
            "scaling_factor": self._scale,
            "shift_factor": self._shift,
        }

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return encode_latents(self._vae, pixels.to(self._device))

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        z = latents.to(self._device, torch.float32) / self._scale + self._shift
        pixels: torch.Tensor = self._vae.decode(z).sample
        return pixels


def _load(config: VaeCodec) -> diffusers.AutoencoderKL | diffusers.AutoencoderDC:
    """The VAE in fp32 and eval mode, from safetensors only: a pickle can run code."""
    try:
        vae, info = getattr(diffusers, config.class_name).from_pretrained(
            config.path,
            torch_dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{_KEY}: {config.path} cannot be loaded: {' '.join(str(error).split())}") from None
    check_complete(_KEY, config.path, info)
    return vae.eval()
