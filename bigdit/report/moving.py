"""Videos as animated WebP, without loss: one, or a grid of them."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

Video = npt.NDArray[np.uint8]
"""[frames, height, width] gray or [frames, height, width, 3]."""

_LEAST_SIDE = 96  # pixels of a video in a grid
_GAP = 2


def webp(video: Video, fps: float) -> bytes:
    """An animation that goes on for ever."""
    first, *others = [Image.fromarray(frame) for frame in video]
    buffer = BytesIO()
    first.save(
        buffer,
        "webp",
        save_all=True,
        append_images=others,
        duration=round(1000 / fps),
        loop=0,
        lossless=True,
        exact=True,
    )
    return buffer.getvalue()


def moving_grid(videos: Sequence[Video], columns: int = 5) -> Video:
    """Videos of one shape in rows of `columns`, small ones enlarged without smoothing."""
    factor = -(-_LEAST_SIDE // min(videos[0].shape[1:3]))
    cells = [np.pad(video.repeat(factor, 1).repeat(factor, 2), _border(video), constant_values=255) for video in videos]
    columns = min(columns, len(cells))
    cells += [np.full_like(cells[0], 255)] * (-len(cells) % columns)
    rows = [np.concatenate(cells[start : start + columns], axis=2) for start in range(0, len(cells), columns)]
    return np.concatenate(rows, axis=1)


def _border(video: Video) -> list[tuple[int, int]]:
    """Around height and width."""
    return [(0, 0), (_GAP, _GAP), (_GAP, _GAP), (0, 0)][: video.ndim]
