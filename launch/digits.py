"""Scikit-learn's 1,797 handwritten digits as PNG files or videos, and classifiers for digits and their movement.

They are real images that need no download. With captions they are padded to three aspect ratios in turn: 8 × 8, 8 ×
12 and 12 × 8 pixels (height × width). So a run has several buckets. By class they are 8 × 8, in a folder a digit.
Videos are animated WebP files with captions: 5 frames of 12 × 12 pixels at 8 frames a second. In each a digit of 8 ×
8 moves through the middle by one pixel a frame: left, right, up or down.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PADDINGS = (((0, 0), (0, 0)), ((0, 0), (2, 2)), ((2, 2), (0, 0)))
INK = 16  # the data set counts ink from 0 to 16; an image has 0 to 255
SIDE, FRAMES, FPS = 12, 5, 8
WAYS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Rows and columns from one frame to the next."""

Video = npt.NDArray[np.uint8]
"""[frames, height, width]."""


def caption(digit: int) -> str:
    """The caption of a digit, in training and in sampling."""
    return f"a handwritten {WORDS[digit]}"


def write_digits(folder: Path) -> int:
    """Write all digits into `folder`. Returns their count."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    images = np.round(digits.images * (255 / INK)).astype(np.uint8)
    for i, (image, digit) in enumerate(zip(images, digits.target, strict=True)):
        padded = np.pad(image, PADDINGS[i % len(PADDINGS)])
        Image.fromarray(padded).save(folder / f"{i:04d}.png")
        (folder / f"{i:04d}.txt").write_text(caption(int(digit)) + "\n")
    return len(images)


def write_classes(folder: Path) -> int:
    """Write each digit into its class's folder, as in `seven/0007.png`. Returns their count."""
    digits = load_digits()
    images = np.round(digits.images * (255 / INK)).astype(np.uint8)
    for i, (image, digit) in enumerate(zip(images, digits.target, strict=True)):
        place = folder / WORDS[digit]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i:04d}.png")
    return len(images)


def read_digits(images: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
    """Read digits in images [8, 8] by a support vector machine that was fitted to the real digits alone."""
    digits = load_digits()
    reader = SVC(gamma=0.001).fit(digits.data, digits.target)
    ink = np.stack([image.astype(np.float64).ravel() * (INK / 255) for image in images])
    return [int(digit) for digit in reader.predict(ink)]


def moving(image: npt.NDArray[np.uint8], way: str) -> Video:
    """The frames of a moving digit."""
    video = np.zeros((FRAMES, SIDE, SIDE), np.uint8)
    middle = (SIDE - len(image)) // 2
    for number, frame in enumerate(video):
        top, left = (middle + step * (number - FRAMES // 2) for step in WAYS[way])
        frame[top : top + len(image), left : left + len(image)] = image
    return video


def videos() -> list[tuple[Video, int, str]]:
    """All videos with digit and direction; the directions are interleaved."""
    digits, ways = load_digits(), list(WAYS)
    images = np.round(digits.images * (255 / INK)).astype(np.uint8)
    chosen = [ways[number % len(ways)] for number in range(len(images))]
    moved = [moving(image, way) for image, way in zip(images, chosen, strict=True)]
    return [(video, int(digit), way) for video, digit, way in zip(moved, digits.target, chosen, strict=True)]


def write_videos(folder: Path) -> int:
    """Write all videos into `folder`. Returns their count."""
    folder.mkdir(parents=True, exist_ok=True)
    written = videos()
    for number, (video, digit, way) in enumerate(written):
        first, *others = [Image.fromarray(frame) for frame in video]
        path = folder / f"{number:04d}.webp"
        first.save(path, save_all=True, append_images=others, duration=1000 // FPS, lossless=True)
        path.with_suffix(".txt").write_text(f"{way}: {WORDS[digit]}" + "\n")
    return len(written)


def read_ways(found: Sequence[Video]) -> list[str]:
    """Read directions by a support vector machine that was fitted to the real videos alone."""
    real = videos()
    reader = SVC().fit([video.ravel() / 255 for video, _, _ in real], [way for _, _, way in real])
    return [str(way) for way in reader.predict([video.ravel() / 255 for video in found])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write scikit-learn's handwritten digits as PNG files with captions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", action="store_true", help="without captions, in a folder a class")
    parser.add_argument("--moving", action="store_true", help="as videos with captions")
    asked = parser.parse_args()
    if asked.classes:
        print(f"wrote {write_classes(asked.folder)} images by class to {asked.folder}")
    elif asked.moving:
        print(f"wrote {write_videos(asked.folder)} videos with captions to {asked.folder}")
    else:
        print(f"wrote {write_digits(asked.folder)} images with captions to {asked.folder}")


if __name__ == "__main__":
    main()
