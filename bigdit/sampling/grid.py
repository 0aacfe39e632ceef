"""Pictures as PNG: one, or a grid of them with their captions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from io import BytesIO

import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]
"""[height, width] gray or [height, width, 3]."""


def png(picture: Picture) -> bytes:
    """PNG bytes of one picture."""
    from PIL import Image

    buffer = BytesIO()
    Image.fromarray(picture).save(buffer, format="png")
    return buffer.getvalue()


def grid_png(pictures: Sequence[Picture], captions: Sequence[str], columns: int = 5) -> bytes:
    """PNG bytes: the pictures in rows of `columns`, small ones enlarged without smoothing, captions below."""
    from matplotlib.figure import Figure

    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(1.8 * columns, 2.15 * rows), dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, picture, caption in zip(axes, pictures, captions, strict=False):
        axis.imshow(picture, cmap="gray" if picture.ndim == 2 else None, vmin=0, vmax=255, interpolation="nearest")
        axis.set_title("\n".join(textwrap.wrap(caption, 24)), fontsize=8)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()
