"""Videos as files: every pixel and every frame is kept, alone and in a grid."""

import io

import numpy as np
import pytest
from PIL import Image, ImageSequence

from bigdit.sampling.grid import moving_grid, small, stills_png, webp


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


def test_a_small_one_is_a_fraction_of_the_same_with_small_losses():
    ramp = np.linspace(0, 255, 1000).astype(np.uint8)
    video = np.broadcast_to(ramp[None, :, None, None], (3, 1000, 600, 3))
    found = small(video)
    assert found.shape == (3, 334, 200, 3)
    assert small(found[..., 0]).shape == (3, 334, 200)  # gray, and already small
    data = webp(found, 8, lossless=False)
    assert len(data) < len(webp(found, 8)) / 2
    assert np.abs(read(data).astype(int) - found).mean() < 2


@pytest.mark.parametrize(("frames", "shown"), [(9, [0, 2, 4, 6, 8]), (2, [0, 1]), (1, [0])])
def test_stills_are_of_the_first_frame_to_the_last(frames, shown):
    videos = [np.full((frames, 90, 90, 3), 100 * number, np.uint8) for number in (1, 2)]
    for video in videos:
        video += np.arange(frames, dtype=np.uint8)[:, None, None, None]
    with Image.open(io.BytesIO(stills_png(videos, ["one", "two"]))) as image:
        pixels = np.asarray(image.convert("RGB"))
    wanted = {100 * number + place for number in (1, 2) for place in shown}
    values, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    plain = {int(each[0]) for each, count in zip(values, counts, strict=True) if len({*each}) == 1 and count > 9000}
    assert plain - {255} == wanted
