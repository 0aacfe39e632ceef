"""Values that do not change; what is trained, and on what."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from bigdit.numbers import Count


class Strict(BaseModel):
    """A value: unknown keys are errors, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def digest(self) -> str:
        """Sixteen hex digits that name this value, for caches and checks of identity."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class Section(Strict):
    """A section of a user's document. The docstring under a field is its meaning: the reference and errors show it."""

    # Reading docstrings takes some 3 ms a class, so that only sections do it.
    model_config = ConfigDict(use_attribute_docstrings=True)

    also: ClassVar[dict[str, str]] = {}
    """Keys that a document may have in place of a field, and what they mean."""


class ModelSpec(Strict):
    """A diffusion transformer: its class, the constructor arguments, and what it is called."""

    name: str
    class_name: str
    kwargs: dict[str, Any]


class BatchShape(Strict):
    """Shapes of one sample: latents (channels, height, width), or (channels, frames, height, width) of a video;
    text (tokens, dim), None without text; `latents_dtype`: on the host, as they are stored. What else a family feeds
    its model follows from the model."""

    latents: tuple[Count, Count, Count] | tuple[Count, Count, Count, Count]
    text: tuple[Count, Count] | None = None
    latents_dtype: Literal["fp32", "bf16"] = "fp32"
