"""The largest micro-batches of models on emulated GPUs: `python benchmarks/gallery.py`.

Each cell is a strategy whose micro-batch grows until two steps do not fit any more. It then runs at 1, at half of the
largest and at the largest, for a curve. Attempts are cached, so that the command continues where it was. It writes
gallery.json, the tables of gallery.md and an image per model in gallery/. With --keep it runs only what gallery.json
lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from curves import Point, draw
from pydantic import NonNegativeInt

from bigdit import catalog
from bigdit.config.strategy_text import parse_strategy
from bigdit.errors import UserError, guard
from bigdit.files import write_json, write_text
from bigdit.memory.process import non_torch_memory_of
from bigdit.profile.attempt import Attempt, AttemptJob, StepRequest, request_for
from bigdit.profile.gpus import EmulatedGpus, Row
from bigdit.strategy import Strict

HERE = Path(__file__).parent
FOUND, PAGE, IMAGES = HERE / "gallery.json", HERE / "gallery.md", HERE / "gallery"

MODELS = (
    *("dit-xl-2-paper", "pixart-sigma-xl-2-1024", "sana-600m-1024", "sana-1600m-1024", "sd3.5-medium"),
    *("flux.1-dev", "qwen-image", "wan2.1-t2v-1.3b", "wan2.1-t2v-14b"),
)
GPUS = (("rtx-3060-12g", 1), ("rtx-4090", 1), ("a40", 1), ("a100-80g-sxm", 1), ("h100-sxm", 1), ("a40", 8))
WAYS = {"full": "checkpointed_blocks=all", "LoRA": "checkpointed_blocks=all,lora.rank=16"}
"""AdamW, bf16 with fp32 masters for trained weights, cached features, expandable segments."""

MARK = "<!-- tables -->"

AGAIN = (
    ("full", "sana-600m-1024", "rtx-3060-12g", 1),
    ("LoRA", "sana-600m-1024", "rtx-3060-12g", 1),
    ("full", "sana-600m-1024", "a40", 8),
    ("LoRA", "flux.1-dev", "a40", 8),
)
"""A cell of each kind, whose commands the page shows."""

CURVES = """The most that nvidia-smi shows of the process, from one sample to the largest micro-batch of each GPU. The
cells above ran at 1, at half of the largest and at the largest. Curves of single GPUs lie on one another where these
choose the same kernels. Curves of 8 × a40 are of one of the eight, with FSDP2."""


class Cell(Strict):
    """The `largest` micro-batch that fits, where one more does not. 0: none fits. None: not known, and `why`.
    `points`: memory from 1 to the largest."""

    model: str
    gpu: str
    gpus: int
    way: str
    strategy: str
    largest: NonNegativeInt | None
    why: str | None
    points: tuple[Point, ...] = ()

    @classmethod
    def of(cls, model: str, gpu: str, gpus: int, way: str) -> Cell:
        """A cell without an answer."""
        return cls(model=model, gpu=gpu, gpus=gpus, way=way, strategy=strategy(way, gpus), largest=None, why=None)

    @property
    def asked(self) -> tuple[str, str, int, str]:
        """What identifies the cell."""
        return self.model, self.gpu, self.gpus, self.way

    @property
    def searched(self) -> bool:
        return self.largest is not None or self.why is not None

    @property
    def whole(self) -> bool:
        """Whether its curve is complete, or it has none."""
        return self.searched and bool(self.points or not self.largest)


def named(gpu: str, gpus: int) -> str:
    """The GPUs' name in columns and curves."""
    return gpu if gpus == 1 else f"{gpus} × {gpu}"


def strategy(way: str, gpus: int) -> str:
    """The strategy as `bigdit bench memory --strategy` takes it."""
    return f"{'single' if gpus == 1 else f'fsdp2,world_size={gpus}'},{WAYS[way]}"


def cells(kept: Sequence[Cell]) -> Iterator[Cell]:
    """All cells, by GPU: those of one kind share a process. Cells in `kept` do not run again."""
    known = {cell.asked: cell for cell in kept}
    for name, gpus in GPUS:
        asked = [Cell.of(model, name, gpus, way) for model in MODELS for way in WAYS]
        found = [known.get(each.asked, each) for each in asked]
        yield from found if all(each.whole for each in found) else ran(found, catalog.resolve_gpu(name), gpus)


def ran(asked: Sequence[Cell], card: catalog.Gpu, gpus: int) -> Iterator[Cell]:
    """Run a GPU's cells, with all that was not known. The search for each begins at the last one's size."""
    non_torch_bytes = non_torch_memory_of(parse_strategy([strategy("full", gpus)]), card).high_bytes
    guess = dict.fromkeys(MODELS, 1)
    with EmulatedGpus(card) as cards:
        for cell in asked:
            known = cell if cell.searched else searched(cards, cell, guess[cell.model], non_torch_bytes)
            guess[cell.model] = max(known.largest or 0, 1)
            yield known if known.whole else curved(cards, known, non_torch_bytes)


def searched(cards: EmulatedGpus, cell: Cell, guess: int, non_torch_bytes: int) -> Cell:
    """The cell with its largest size. The search begins at the guess."""
    card = catalog.resolve_gpu(cell.gpu)
    cards.unanswered.clear()
    found = cards.largest(Row(sized(cell.model, card, cell.strategy), guess), card.usable_bytes - non_torch_bytes)
    largest = None if found is None else int(found[0])
    return cell.model_copy(update={"largest": largest, "why": next(iter(cards.unanswered), None)})


def curved(cards: EmulatedGpus, cell: Cell, non_torch_bytes: int) -> Cell:
    """The cell with its memory at 1, at half of the largest, and at the largest."""
    assert cell.largest is not None
    card = catalog.resolve_gpu(cell.gpu)
    request, capacity = sized(cell.model, card, cell.strategy), card.usable_bytes - non_torch_bytes
    sizes = sorted({1, (1 + cell.largest) // 2, cell.largest})
    attempts = cards.attempts([AttemptJob(request=request(size), capacity_bytes=capacity) for size in sizes])
    points = [
        Point(micro_batch=size, process_bytes=attempt.peak_reserved_bytes + non_torch_bytes)
        for size, attempt in zip(sizes, attempts, strict=True)
        if isinstance(attempt, Attempt) and attempt.fits
    ]
    if len(points) < len(sizes):
        what = f"{cell.model}, {cell.way}, {cell.gpus} × {cell.gpu}"
        raise UserError(f"{what}: of {sizes} {[each.micro_batch for each in points]} fit now; leave out --keep")
    return cell.model_copy(update={"points": tuple(points)})


def sized(model: str, card: catalog.Gpu, text: str) -> Callable[[int], StepRequest]:
    """The requests of a model's strategy by micro-batch size."""
    found, asked = catalog.find_model(model), parse_strategy([text])
    return lambda size: request_for(found, card, asked.with_micro_batch_size(size))


def page(found: list[Cell]) -> str:
    """A command for each kind of cell, a table for each way, a row for each model; and the images."""
    known = {cell.asked: cell for cell in found}
    lines = ["## Any cell again", "", "The largest size fits, and one more does not. A command of each kind:", ""]
    lines += [again(known[model, gpu, gpus, way]) for way, model, gpu, gpus in AGAIN]
    lines += ["", "Of 8 × a40 the first of eight processes runs, on its own emulated GPU.", ""]
    for way in WAYS:
        heads = [named(*each) for each in GPUS]
        lines += [f"## {way}", "", f"| model | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(GPUS)]
        for model in MODELS:
            row = [_shown(known.get((model, *card, way))) for card in GPUS]
            lines.append(f"| {model} | {' | '.join(row)} |")
        lines.append("")
    unknown = [each for each in found if each.largest is None]
    lines += [f"- {each.model}, {each.way}, {each.gpus} × {each.gpu}: {each.why}" for each in unknown]
    lines += ["## Memory against micro-batch", "", CURVES, ""]
    for model in MODELS:
        lines += [f"![memory of {model} against micro-batch](gallery/{model}.png)", ""]
    return "\n".join(lines)


def again(cell: Cell) -> str:
    """The command that runs the cell again, as a line of the page."""
    assert cell.largest
    words = ("bench memory --model", cell.model, "--gpu", cell.gpu, "--strategy", cell.strategy)
    return f"    bigdit {' '.join(words)} --micro-batch {cell.largest},{cell.largest + 1}"


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return "?" if cell.largest is None else str(cell.largest or "–")


def draw_all(found: Sequence[Cell]) -> None:
    """An image for each model, with a curve for each way on each GPU where it fits."""
    IMAGES.mkdir(exist_ok=True)
    usable = {name: catalog.resolve_gpu(name).usable_bytes for name, _ in GPUS}
    known = {each.asked: each for each in found}
    for model in MODELS:
        ways = {way: {named(*card): known[model, *card, way].points for card in GPUS} for way in WAYS}
        draw(IMAGES / f"{model}.png", model, ways, usable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="run what gallery.json lacks alone, and draw the images")
    keep = parser.parse_args().keep
    text = PAGE.read_text()
    if MARK not in text:
        raise UserError(f"{PAGE} has no line {MARK}, below which the tables go")
    before = [Cell.model_validate(each) for each in json.loads(FOUND.read_text())]
    found = {cell.asked: cell for cell in before}  # until a cell has run again
    for cell in cells(before if keep else []):
        found[cell.asked] = cell
        print(f"{cell.model}, {cell.gpus} × {cell.gpu}, {cell.way}: {cell.largest}", flush=True)
        write_json(FOUND, [each.model_dump(mode="json") for each in found.values()])
    write_text(PAGE, f"{text.partition(MARK)[0]}{MARK}\n\n{page([*found.values()])}")
    draw_all([*found.values()])


if __name__ == "__main__":
    sys.exit(guard(main))
