"""What the encoders of a run take of the host where they are loaded there, by what their folders hold."""

from __future__ import annotations

from bigdit.config.run import EncodersConfig, TextEncoderConfig, VaeCodec
from bigdit.documents import parse_json
from bigdit.encoders.folder import weights_bytes
from bigdit.units import gib


def host_bytes_said(encoders: EncodersConfig) -> str | None:
    """The weights of text encoder and VAE, as a line has them; None where neither is known."""
    text, image = encoders.text, encoders.image
    found = {
        "text encoder": None if text is None else text_bytes(text),
        "VAE": weights_bytes(image.path, image.dtype) if isinstance(image, VaeCodec) else None,
    }
    parts = [f"{name} {gib(nbytes)}" for name, nbytes in found.items() if nbytes]
    return " and ".join(parts) or None


def text_bytes(text: TextEncoderConfig) -> int | None:
    """Of all text encoders of a pipeline, or of the one; None where they cannot be read, or have no folder."""
    if text.pipeline is None:
        return None if text.path is None else weights_bytes(text.path, text.dtype)
    try:
        index = parse_json((text.pipeline / "model_index.json").read_bytes())
        names = [name for name, entry in index.items() if name.startswith("text_encoder") and entry[0]]
    except (OSError, ValueError, AttributeError, TypeError, IndexError):
        return None
    sizes = [weights_bytes(text.pipeline / name, text.dtype) for name in names]
    return sum(size for size in sizes if size is not None) or None
