"""What the encoders of a run take of the host where they are loaded there, by what their folders hold."""

from __future__ import annotations

from bigdit.config.encoders import EncodersConfig, TextEncoderConfig, VaeCodec
from bigdit.documents import parse_json
from bigdit.encoders.weights import weights_bytes
from bigdit.numbers import Natural
from bigdit.spec import Strict
from bigdit.units import gib


class HostWeights(Strict):
    """Bytes of the weights of text encoder and VAE: 0 where the run has none, None where no folder tells."""

    text_encoder: Natural | None
    vae: Natural | None

    @property
    def known_bytes(self) -> int:
        """Of both, as far as they are known."""
        return (self.text_encoder or 0) + (self.vae or 0)

    @property
    def said(self) -> str | None:
        """Those that are known, as a line has them; None where neither is."""
        found = {"text encoder": self.text_encoder, "VAE": self.vae}
        return " and ".join(f"{name} {gib(nbytes)}" for name, nbytes in found.items() if nbytes) or None

    @property
    def unknown(self) -> str | None:
        """Those that no folder tells, by name."""
        found = {"text encoder": self.text_encoder, "VAE": self.vae}
        return " and ".join(name for name, nbytes in found.items() if nbytes is None) or None


def host_weights(encoders: EncodersConfig) -> HostWeights:
    """Of what `samples` loads on the host of the main process, to encode captions and to decode pictures."""
    text, image = encoders.text, encoders.image
    return HostWeights(
        text_encoder=0 if text is None else text_bytes(text),
        vae=weights_bytes(image.path, image.dtype) if isinstance(image, VaeCodec) else 0,
    )


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
    return None if None in sizes else sum(size or 0 for size in sizes) or None
