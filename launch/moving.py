"""Scikit-learn's handwritten digits that move to the left, the right, up or down, as animated WebP files with captions,
and a classifier that reads where a digit moves.

Each is 5 frames of 12 × 12 pixels, 8 a second, in which a digit of 8 × 8 goes one pixel a frame, through the middle.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from digits import INK, WORDS
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

SIDE, FRAMES, FPS = 12, 5, 8
WAYS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Rows and columns from one frame to the next."""

Video = npt.NDArray[np.uint8]
"""[frames, height, width]."""


def caption(digit: int, way: str) -> str:
    """The caption of a video, and asked for when sampling."""
    return f"{way}: {WORDS[digit]}"


def moving(image: npt.NDArray[np.uint8], way: str) -> Video:
    """A digit that moves."""
    video = np.zeros((FRAMES, SIDE, SIDE), np.uint8)
    middle = (SIDE - len(image)) // 2
    for number, frame in enumerate(video):
        top, left = (middle + step * (number - FRAMES // 2) for step in WAYS[way])
        frame[top : top + len(image), left : left + len(image)] = image
    return video


def videos() -> list[tuple[Video, int, str]]:
    """All of them, with digit and way; the ways interleaved."""
    digits, ways = load_digits(), list(WAYS)
    images = np.round(digits.images * (255 / INK)).astype(np.uint8)
    chosen = [ways[number % len(ways)] for number in range(len(images))]
    moved = [moving(image, way) for image, way in zip(images, chosen, strict=True)]
    return [(video, int(digit), way) for video, digit, way in zip(moved, digits.target, chosen, strict=True)]


def write_videos(folder: Path) -> int:
    """Write all of them into `folder`; returns their count."""
    folder.mkdir(parents=True, exist_ok=True)
    written = videos()
    for number, (video, digit, way) in enumerate(written):
        first, *others = [Image.fromarray(frame) for frame in video]
        path = folder / f"{number:04d}.webp"
        first.save(path, save_all=True, append_images=others, duration=1000 // FPS, lossless=True)
        path.with_suffix(".txt").write_text(caption(digit, way) + "\n")
    return len(written)


def read_ways(found: Sequence[Video]) -> list[str]:
    """Where a support vector machine, fitted on the real videos alone, sees digits move."""
    real = videos()
    reader = SVC().fit([video.ravel() / 255 for video, _, _ in real], [way for _, _, way in real])
    return [str(way) for way in reader.predict([video.ravel() / 255 for video in found])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write scikit-learn's handwritten digits as videos with captions.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(f"wrote {write_videos(folder)} videos with captions to {folder}")


if __name__ == "__main__":
    main()
