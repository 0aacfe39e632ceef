"""Scikit-learn's 1,797 handwritten digits as PNG files, and a classifier that reads digits.

Real images without a download. With captions they are padded to three aspect ratios in turn (8 × 8, 8 × 12 and 12 × 8
pixels, height × width), so that buckets are used; by class they are 8 × 8, in a folder a digit.
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


def caption(digit: int) -> str:
    """The caption of an image of this digit, and asked for when sampling."""
    return f"a handwritten {WORDS[digit]}"


def write_digits(folder: Path) -> int:
    """Write all digits into `folder`; returns their count."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    images = np.round(digits.images * (255 / INK)).astype(np.uint8)
    for i, (image, digit) in enumerate(zip(images, digits.target, strict=True)):
        padded = np.pad(image, PADDINGS[i % len(PADDINGS)])
        Image.fromarray(padded).save(folder / f"{i:04d}.png")
        (folder / f"{i:04d}.txt").write_text(caption(int(digit)) + "\n")
    return len(images)


def write_classes(folder: Path) -> int:
    """Write all digits into a folder of each class, `seven/0007.png`; returns their count."""
    digits = load_digits()
    images = np.round(digits.images * (255 / INK)).astype(np.uint8)
    for i, (image, digit) in enumerate(zip(images, digits.target, strict=True)):
        place = folder / WORDS[digit]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i:04d}.png")
    return len(images)


def read_digits(images: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
    """What a support vector machine, fitted on the real digits alone, reads in images [8, 8]."""
    digits = load_digits()
    reader = SVC(gamma=0.001).fit(digits.data, digits.target)
    ink = np.stack([image.astype(np.float64).ravel() * (INK / 255) for image in images])
    return [int(digit) for digit in reader.predict(ink)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write scikit-learn's handwritten digits as PNG files with captions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", action="store_true", help="without captions, in a folder a class")
    asked = parser.parse_args()
    if asked.classes:
        print(f"wrote {write_classes(asked.folder)} images by class to {asked.folder}")
    else:
        print(f"wrote {write_digits(asked.folder)} images with captions to {asked.folder}")


if __name__ == "__main__":
    main()
