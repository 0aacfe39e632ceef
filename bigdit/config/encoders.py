"""The sections of a run's YAML that say what makes latents and embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bigdit.numbers import Count, Natural, Switch
from bigdit.spec import Section

T5_TOKENS = 300
"""Where nothing else is said, as in PixArt-Σ (arXiv:2403.04692) and Sana (arXiv:2410.10629)."""


class IdentityCodec(Section):
    """Pixels as latents, scaled to [-1, 1] and unshuffled to factor² × channels channels; exactly invertible."""

    name: Literal["identity"] = "identity"
    """identity chooses this codec."""
    factor: Count = 1
    """Pixels of a latent's side."""
    color: Literal["rgb", "gray"] = "rgb"
    """Three channels, or one."""


class VaeCodec(Section):
    """A VAE of diffusers. Its latents are scaled and shifted as its family's pipeline does it."""

    name: Literal["vae"] = "vae"
    """vae chooses this codec."""
    class_name: Literal[
        "AutoencoderKL",
        "AutoencoderDC",
        "AutoencoderKLFlux2",
        "AutoencoderKLQwenImage",
        "AutoencoderKLWan",
        "AutoencoderKLLTXVideo",
        "AutoencoderKLHunyuanImage",
        "AutoencoderKLHunyuanVideo",
        "AutoencoderKLHunyuanVideo15",
        "AutoencoderKLCogVideoX",
        "AutoencoderKLMochi",
    ]
    """The class of the VAE in diffusers."""
    path: Path
    """The folder of the VAE, as save_pretrained writes it."""
    latents: Literal["mode", "sampled", "moments"] = "mode"
    """What is kept of the VAE's distribution: its mode; one draw; or mean and standard deviation, of which loaders draw
    anew each time."""
    seed: Natural = 0
    """With latents sampled: what the draw follows from, beside the image's place in the source."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What the VAE computes in."""
    tiling: Switch = False
    """Encode in tiles that are blended at their seams: less memory, and slightly other latents."""


class TextEncoderConfig(Section):
    """What encodes captions: one of `pipeline`, `path` and `config`."""

    pipeline: Path | None = None
    """The folder of a diffusers pipeline, whose text encoders and tokenizers encode as it does."""
    class_name: Literal["T5EncoderModel"] = "T5EncoderModel"
    """The class of what `path` or `config` describe."""
    path: Path | None = None
    """The folder of a T5: safetensors weights and tokenizer."""
    config: dict[str, Any] | None = None
    """Arguments of T5Config, for random weights and a byte-level tokenizer: nothing is downloaded."""
    seed: Natural = 0
    """With config: what the weights are drawn from."""
    max_tokens: Count | None = None
    """Tokens that captions are cut to. null: 300, or as many as the pipeline takes."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What the encoders compute in."""
    stored: Literal["bf16", "fp8"] = "bf16"
    """How the store keeps hidden states. fp8 (e4m3 with a scale a token) takes half the bytes, and is off by 2.6 %."""

    @property
    def tokens_asked(self) -> int | None:
        """The most tokens of a caption; None: as many as the pipeline takes."""
        return self.max_tokens or (T5_TOKENS if self.pipeline is None else None)


class FirstFrameConfig(Section):
    """The first frame of videos, for models that begin with one; its latents are made by encoders.image."""

    pipeline: Path | None = None
    """The folder of a diffusers pipeline, whose image encoder embeds the frame where the model takes that."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What the image encoder computes in."""


class EncodersConfig(Section):
    """What turns images and captions into latents and embeddings. The same encoders serve sampling."""

    image: IdentityCodec | VaeCodec = Field(discriminator="name")
    """What makes latents of images and videos."""
    text: TextEncoderConfig | None = None
    """What makes embeddings of captions. null: the model takes classes."""
    first_frame: FirstFrameConfig | None = None
    """What is made of a video's first frame, for models that begin with an image."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where `bigdit extract` encodes. auto: on all GPUs of the machine, else on its CPU."""
    batch_size: Count | Literal["auto"] = "auto"
    """Images, frames or captions that `bigdit extract` encodes at once; halved where memory runs out. auto: on a GPU
    what fits, else 16, one caption on a CPU, and one video."""
