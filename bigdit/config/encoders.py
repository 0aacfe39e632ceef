"""The sections of a run's YAML that say what makes features of it. What each key means is said here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bigdit.numbers import Count, Natural, Switch
from bigdit.spec import Strict

T5_TOKENS = 300
"""Where nothing else is said, as in PixArt-Σ (arXiv:2403.04692) and Sana (arXiv:2410.10629)."""


class IdentityCodec(Strict):
    """Pixels as latents: scaled to [-1, 1] and unshuffled, `factor`² × channels channels; exactly invertible.

    `name`: identity, which chooses it. `color`: three channels, or one.
    """

    name: Literal["identity"] = "identity"
    factor: Count = 1
    color: Literal["rgb", "gray"] = "rgb"


class VaeCodec(Strict):
    """A diffusers VAE in the folder `path`, as its save_pretrained writes it; its latents are scaled and shifted, or
    brought to mean 0 and deviation 1, as its family's pipeline does it.

    `name`: vae, which chooses it; `class_name`: the VAE's class in diffusers. `latents`: the mode of its distribution;
    `sampled`, once, from `seed` and the picture's place in the source; or its `moments`, mean and standard deviation,
    for loaders that draw anew each time. `dtype`: what it computes in. `tiling`: what is large goes through it in
    tiles, blended at their seams: less memory, and slightly other latents.
    """

    name: Literal["vae"] = "vae"
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
    path: Path
    latents: Literal["mode", "sampled", "moments"] = "mode"
    seed: Natural = 0
    dtype: Literal["fp32", "bf16"] = "fp32"
    tiling: Switch = False


class TextEncoderConfig(Strict):
    """One of: `pipeline`, the folder of a diffusers pipeline, whose text encoders and tokenizers encode as it does;
    `path` to the folder of a T5 (safetensors weights and tokenizer); or `config`, T5Config's arguments, for one with
    weights drawn from `seed` and a byte-level tokenizer, which needs no download. `class_name`: the class of these two.

    Captions are cut to `max_tokens`: 300, or as many as the pipeline takes. `dtype`: what the encoders compute in.
    `stored`: how the store keeps hidden states; fp8, e4m3 with a scale for each token, takes half the bytes and is off
    by 2.6 % of a state.
    """

    pipeline: Path | None = None
    class_name: Literal["T5EncoderModel"] = "T5EncoderModel"
    path: Path | None = None
    config: dict[str, Any] | None = None
    seed: Natural = 0
    max_tokens: Count | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"
    stored: Literal["bf16", "fp8"] = "bf16"

    @property
    def tokens_asked(self) -> int | None:
        """The most tokens of a caption; None: as many as the pipeline takes."""
        return self.max_tokens or (T5_TOKENS if self.pipeline is None else None)


class FirstFrameConfig(Strict):
    """The first frame of videos, for models that begin with one: its latents by `encoders.image`, and, where the model
    takes embeddings of it, those of the image encoder of `pipeline`, the folder of a diffusers pipeline. `dtype`: what
    that computes in.
    """

    pipeline: Path | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"


class EncodersConfig(Strict):
    """What turns pictures (`image`) and captions (`text`; of a model of classes, none) into features; of models that
    begin with an image, the `first_frame` of videos too. The same encoders serve sampling.

    `device`: where they encode; auto: on the GPUs of the machine, its workers by turns, or else on its cores.
    `batch_size`: pictures, or frames of videos, and captions, that are encoded at once; auto: on a GPU what the
    encode phase of a catalogue's model leaves room for, else 16, and on a CPU one caption; but one video.
    Halved where memory runs out, raised again.
    """

    image: IdentityCodec | VaeCodec = Field(discriminator="name")
    text: TextEncoderConfig | None = None
    first_frame: FirstFrameConfig | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch_size: Count | Literal["auto"] = "auto"
