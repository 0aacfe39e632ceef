"""The CPU memory of a run's encoders, from the headers of their weight files. It does not import torch."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from bigdit.catalog.families import IMAGE_ENCODER
from bigdit.config.data import EncodersConfig, TextEncoderConfig, VaeCodec
from bigdit.documents import Natural, read_json, weight_files
from bigdit.strategy import Strict
from bigdit.units import gib

WEIGHTS = ("model.safetensors", "diffusion_pytorch_model.safetensors")  # transformers' and diffusers' names
_SIZES = {"fp32": 4, "bf16": 2}


def weights_bytes(folder: Path, dtype: str) -> int | None:
    """Bytes of the weights in a folder or file, loaded in a dtype; None if they cannot be read."""
    sizes = []
    try:
        for file in weight_files(folder, *WEIGHTS)[0]:
            with safe_open(file, "np") as opened:  # this reads headers only
                slices = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118  # it is no mapping
                sizes += [math.prod(each.get_shape()) * _itemsize(each.get_dtype(), dtype) for each in slices]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError):
        return None
    return sum(sizes) if sizes else None


def _itemsize(stored: str, dtype: str) -> int:
    """Bytes of a value that safetensors has in dtype `stored`. Floats are loaded in `dtype`."""
    if stored.startswith(("F", "BF")):
        return _SIZES[dtype]
    return {"BOOL": 1}.get(stored) or int(stored[1:]) // 8


class HostWeights(Strict):
    """Bytes of the weights of text encoder, VAE and image encoder; 0 if the run has none, None if unknown."""

    text_encoder: Natural | None
    vae: Natural | None
    image_encoder: Natural | None = 0

    @property
    def known_bytes(self) -> int:
        """The sum of the known ones."""
        return sum(nbytes or 0 for nbytes in self._by_name.values())

    @property
    def known(self) -> str | None:
        """The names and sizes of the known ones."""
        return " and ".join(f"{name} {gib(nbytes)}" for name, nbytes in self._by_name.items() if nbytes) or None

    @property
    def unknown(self) -> str | None:
        """The names of the unknown ones."""
        return " and ".join(name for name, nbytes in self._by_name.items() if nbytes is None) or None

    @property
    def _by_name(self) -> dict[str, int | None]:
        return {"text encoder": self.text_encoder, "VAE": self.vae, "image encoder": self.image_encoder}


def host_weights(encoders: EncodersConfig) -> HostWeights:
    """The encoders that `samples` loads in CPU memory: for captions, first frames, and decoding images."""
    text, image, first = encoders.text, encoders.image, encoders.first_frame
    return HostWeights(
        text_encoder=0 if text is None else text_bytes(text),
        vae=weights_bytes(image.path, image.dtype) if isinstance(image, VaeCodec) else 0,
        image_encoder=0
        if first is None or first.pipeline is None
        else weights_bytes(first.pipeline / IMAGE_ENCODER, first.dtype),
    )


def text_bytes(text: TextEncoderConfig) -> int | None:
    """Bytes of all text encoders of a run; None without a folder, or if it cannot be read."""
    if text.pipeline is None:
        return None if text.path is None else weights_bytes(text.path, text.dtype)
    try:
        index = read_json(text.pipeline / "model_index.json")
        parts = {name: entry[0] for name, entry in index.items() if name.startswith("text_encoder")}
    except (OSError, ValueError, AttributeError, TypeError, IndexError):
        return None
    # Krea 2's `text_encoder_select_layers` are numbers. Encoders that are left out have null.
    names = [name for name, library in parts.items() if isinstance(library, str)]
    sizes = [weights_bytes(text.weights_of(name), text.dtype) for name in names]
    return None if None in sizes else sum(size or 0 for size in sizes) or None
