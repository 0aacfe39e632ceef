"""Images as PNG and videos as animated WebP: one, or a grid of them with their captions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
"""[height, width] gray or [height, width, 3]."""


def png(image: Pixels) -> bytes:
    """PNG bytes of one image."""
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, format="png")
    return buffer.getvalue()


def grid_png(images: Sequence[Pixels], captions: Sequence[str], columns: int = 5) -> bytes:
    """PNG bytes: images in rows of `columns`, small ones enlarged without smoothing, captions below."""
    from matplotlib.figure import Figure

    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.8 * columns, 2.15 * rows), dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, image, caption in zip(axes, images, captions, strict=False):
        axis.imshow(image, cmap="gray" if image.ndim == 2 else None, vmin=0, vmax=255, interpolation="nearest")
        axis.set_title("\n".join(textwrap.wrap(caption, 24)), fontsize=8)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


Video = npt.NDArray[np.uint8]
"""[frames, height, width] gray or [frames, height, width, 3]."""

_LEAST_SIDE, _GAP = 96, 2  # pixels, of videos in a grid
_MOST_SIDE = 480
_STILLS = 5


def webp(video: Video, fps: float, *, lossless: bool = True) -> bytes:
    """An animation that loops for ever; a lossy one takes a tenth of the bytes."""
    first, *others = [Image.fromarray(frame) for frame in video]
    buffer = BytesIO()
    first.save(
        buffer,
        "webp",
        save_all=True,
        append_images=others,
        duration=round(1000 / fps),
        loop=0,
        lossless=lossless,
        exact=lossless,
        quality=90,
    )
    return buffer.getvalue()


def moving_grid(videos: Sequence[Video], columns: int = 5) -> Video:
    """Videos of one shape in rows of `columns`, small ones enlarged without smoothing."""
    factor = -(-_LEAST_SIDE // min(videos[0].shape[1:3]))
    border = [(0, 0), (_GAP, _GAP), (_GAP, _GAP), (0, 0)][: videos[0].ndim]
    cells = [np.pad(video.repeat(factor, 1).repeat(factor, 2), border, constant_values=255) for video in videos]
    columns = min(columns, len(cells))
    cells += [np.full_like(cells[0], 255)] * (-len(cells) % columns)
    rows = [np.concatenate(cells[start : start + columns], axis=2) for start in range(0, len(cells), columns)]
    return np.concatenate(rows, axis=1)


def small(video: Video) -> Video:
    """The video, reduced by a whole factor to at most 480 pixels a side."""
    factor = -(-max(video.shape[1:3]) // _MOST_SIDE)
    return np.stack([np.asarray(Image.fromarray(frame).reduce(factor)) for frame in video])


def stills_png(videos: Sequence[Video], captions: Sequence[str]) -> bytes:
    """PNG bytes: a row for each video, with its caption and up to five frames from the first to the last."""
    count = min(_STILLS, len(videos[0]))
    places = np.linspace(0, len(videos[0]) - 1, count).round().astype(int)
    titles = [title for caption in captions for title in (caption, *[""] * (count - 1))]
    return grid_png([frame for video in videos for frame in video[places]], titles, count)
