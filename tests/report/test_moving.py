"""Videos as files: every pixel and every frame comes back, alone and in a grid."""

import io

import numpy as np
import pytest
from PIL import Image, ImageSequence

from bigdit.report.moving import moving_grid, webp


def read(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])


@pytest.mark.parametrize("channels", [(), (3,)])
def test_a_video_loses_nothing(channels):
    video = np.random.default_rng(0).integers(0, 256, (4, 10, 12, *channels), np.uint8)
    found = read(webp(video, 8))
    assert (found == (video if channels else video[..., None])).all()


def test_a_grid_has_each_video_in_its_place_and_frames_in_step():
    videos = [
        np.full((3, 40, 48), number * 20, np.uint8) + np.arange(3, dtype=np.uint8)[:, None, None] for number in range(7)
    ]
    grid = moving_grid(videos)
    assert len(grid) == 3
    rows, columns = 2, 5
    height, width = (side // count for side, count in zip(grid.shape[1:], (rows, columns), strict=True))
    assert (height, width) == (3 * 40 + 4, 3 * 48 + 4)  # enlarged to 96 pixels a side, with a border of 2
    for number in range(7):
        middle = grid[:, height * (number // columns) + height // 2, width * (number % columns) + width // 2]
        assert middle.tolist() == [20 * number, 20 * number + 1, 20 * number + 2]
    assert (grid[:, -1, -1] == 255).all()
