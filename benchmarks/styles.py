"""A style that a trained model does not draw, learned by a LoRA: how many of 100 samples have it, before and after.

    python benchmarks/styles.py [STYLE…] [--folder DIR] [--steps N] [--lora-steps N]

One process: a DiT of classes (launch/recipes/digits-classes.yaml), trained on the digits as they are by flow matching
in fp32, is the base; adapters over it, frozen in bf16, are trained on the same digits in the style alone. Classifiers
that are fitted on real digits, and see no sample, read the pictures of both: which style it is, fitted on half of the
digits as they are and in the style (what it tells apart of the other half is said beside it); and which digit, fitted
on digits in that style. Exit status 1 where after STEPS and LORA_STEPS, or more, a base has the style more often than
PLAIN allows, an adapted model less often than STYLED wants, or fewer than RIGHT are read as the digit asked for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from bigdit.report.tables import table

ROOT = Path(__file__).parents[1]
BIGDIT = Path(sys.executable).parent / "bigdit"
RECIPE = "launch/recipes/digits-classes.yaml"
SAMPLES, STEPS, LORA_STEPS = 100, 800, 400
PLAIN, STYLED, RIGHT = 5, 90, 90
"""Of the samples: 0, 100 and 100 were seen."""
LORA = (
    "strategy.lora={rank: 16, alpha: 16, targets: [qkv, proj, fc1, fc2, linear]}",
    "strategy.precision=bf16",  # adapters are computed with in the base's 16 bits
    "strategy.optimizer.lr=4e-3",
)

sys.path.insert(0, str(ROOT / "launch"))
import digits  # noqa: E402

Ink = npt.NDArray[np.float64]
"""Pictures [n, 8, 8] of ink from 0 to 16, as scikit-learn has them."""


def inverted(ink: Ink) -> Ink:
    """Dark digits on a bright ground."""
    return digits.INK - ink


def bold(ink: Ink) -> Ink:
    """Strokes as wide as their neighbours to the left, the right and below reach."""
    wide = np.pad(ink, ((0, 0), (0, 1), (1, 1)))
    return np.maximum.reduce([wide[:, :-1, 1:-1], wide[:, :-1, :-2], wide[:, :-1, 2:], wide[:, 1:, 1:-1]])


STYLES: dict[str, Callable[[Ink], Ink]] = {"inverted": inverted, "bold": bold}


class Read(NamedTuple):
    """Of a hundred samples: how many have the style, and how many are read as the digit that was asked for."""

    styled: int
    right: int


class Readers:
    """Classifiers of a style and of digits in it, fitted on real digits alone; `sure`: the share of the real ones that
    the first was not fitted on, and of them in the style, that it tells apart."""

    def __init__(self, style: Callable[[Ink], Ink]) -> None:
        known = load_digits()
        plain, styled = known.images, style(known.images)
        self._plain_digit = SVC(gamma=0.001).fit(_flat(plain), known.target)
        self._styled_digit = SVC(gamma=0.001).fit(_flat(styled), known.target)
        both, is_styled = np.concatenate([plain, styled]), np.repeat([0, 1], len(plain))
        fitted = np.tile(np.arange(len(plain)) % 2 == 0, 2)
        self._style = SVC(gamma=0.001).fit(_flat(both[fitted]), is_styled[fitted])
        self.sure = float(self._style.score(_flat(both[~fitted]), is_styled[~fitted]))

    def read(self, pictures: Sequence[npt.NDArray[np.uint8]], asked: Sequence[int]) -> Read:
        """What samples [8, 8] are, of which these digits were asked: each digit is read as one of the style it has."""
        ink = _flat(np.stack([picture.astype(np.float64) * (digits.INK / 255) for picture in pictures]))
        styled = self._style.predict(ink).astype(bool)
        found = np.where(styled, self._styled_digit.predict(ink), self._plain_digit.predict(ink))
        return Read(int(styled.sum()), int((found == np.array(asked)).sum()))


def _flat(ink: Ink) -> Ink:
    return ink.reshape(len(ink), -1)


def write_styled(folder: Path, style: Callable[[Ink], Ink]) -> None:
    """All digits in a style, in a folder a class, as launch/digits.py writes them as they are."""
    known = load_digits()
    pictures = np.round(style(known.images) * (255 / digits.INK)).astype(np.uint8)
    for i, (picture, digit) in enumerate(zip(pictures, known.target, strict=True)):
        place = folder / digits.WORDS[digit]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place / f"{i:04d}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description="Learn a style by LoRA over trained weights, and read the samples.")
    parser.add_argument("names", nargs="*", choices=[[], *STYLES], help="styles; all where none is named")
    parser.add_argument("--folder", type=Path, default=Path("demo/styles"), help="where everything is written")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the base")
    parser.add_argument("--lora-steps", type=int, default=LORA_STEPS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not (folder / "plain").exists():
        digits.write_classes(folder / "plain")
    _train(config(folder, "plain", "base", f"train.steps={arguments.steps}"))
    titles = ["style", "told apart", "model", "has the style", "digit read right", "training"]
    rows = table(f"a LoRA of {arguments.lora_steps} steps over a base of {arguments.steps}", titles)
    missed = False
    for name in arguments.names or STYLES:
        readers, adapted = Readers(STYLES[name]), f"lora-{name}"
        if not (folder / name).exists():
            write_styled(folder / name, STYLES[name])
        base = f"model.init_from={folder / f'base/checkpoints/step-{arguments.steps:08d}'}"
        took = _train(config(folder, name, adapted, base, *LORA, f"train.steps={arguments.lora_steps}"))
        for model, seconds in (("base", ""), (adapted, f"{took:.0f} s")):
            shutil.rmtree(folder / model / "samples", ignore_errors=True)
            _run(BIGDIT, "sample", *drawn(folder / model))
            found = read(readers, folder / model)
            missed |= found.right < RIGHT or (found.styled > PLAIN if model == "base" else found.styled < STYLED)
            counts = (f"{found.styled} of {SAMPLES}", f"{found.right} of {SAMPLES}")
            rows.add_row(name, f"{readers.sure:.1%}", model, *counts, seconds)
    from bigdit import log

    log.out.print(rows)
    return int(missed and arguments.steps >= STEPS and arguments.lora_steps >= LORA_STEPS)


def config(folder: Path, pictures: str, output: str, *overrides: str) -> list[str]:
    """The options of a run on a folder of digits."""
    settings = [
        f"data.images={{path: {folder / pictures}, label: folder}}",
        f"data.features={folder / f'features-{pictures}'}",
        f"output={folder / output}",
        "objective={name: flow_matching}",
        *overrides,
    ]
    return ["--config", RECIPE, *(part for each in settings for part in ("--set", each))]


def drawn(output: Path, count: int = SAMPLES) -> list[str]:
    """The options of `bigdit sample` for so many of a run's samples, of each digit as many."""
    captions = output / "captions.txt"
    captions.write_text("".join(f"{digits.WORDS[digit]}\n" for digit in _asked(count)))
    more = ("--guidance", "2", "--size", "8x8")
    return ["--checkpoint", str(output), "--captions", str(captions), "--out", str(output / "samples"), *more]


def read(readers: Readers, output: Path) -> Read:
    """What the samples of a run are."""
    folder = output / "samples"
    rows = json.loads((folder / "samples.json").read_text())["pictures"]
    return readers.read([np.asarray(Image.open(folder / row["file"])) for row in rows], _asked(len(rows)))


def _asked(count: int) -> list[int]:
    return [i % len(digits.WORDS) for i in range(count)]


def _train(chosen: Sequence[str]) -> float:
    """Seconds of a run, whose pictures are extracted before; one that is done has nothing to do."""
    _run(BIGDIT, "extract", *chosen)
    began = time.perf_counter()
    _run(BIGDIT, "train", *chosen)
    return time.perf_counter() - began


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
