"""The largest micro-batches of models on cards, found by running out of memory: `python benchmarks/gallery.py`.

Each cell is a strategy whose micro-batch is raised on an emulated card until two steps do not fit any more; attempts
are kept, so that the command goes on where it was. Writes gallery.json and the tables of gallery.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import NonNegativeInt

from bigdit import catalog
from bigdit.config.strategy import parse_strategy
from bigdit.errors import UserError, guard
from bigdit.files import write_json, write_text
from bigdit.memory.process import beside_torch
from bigdit.rehearse import RehearsalRequest
from bigdit.rehearse.ask import request_for
from bigdit.search.finding.cards import Cards
from bigdit.spec import Strict

HERE = Path(__file__).parent
FOUND, PAGE = HERE / "gallery.json", HERE / "gallery.md"

MODELS = (
    *("dit-xl-2-paper", "pixart-sigma-xl-2-1024", "sana-600m-1024", "sana-1600m-1024", "sd3.5-medium"),
    *("flux.1-dev", "qwen-image", "wan2.1-t2v-1.3b", "wan2.1-t2v-14b"),
)
CARDS = (("rtx-3060-12g", 1), ("rtx-4090", 1), ("a40", 1), ("a100-80g-sxm", 1), ("h100-sxm", 1), ("a40", 8))
WAYS = {"full": "checkpointed_blocks=all", "LoRA": "checkpointed_blocks=all,lora.rank=16"}
"""AdamW, bf16 with fp32 masters where weights are trained, features cached, expandable segments."""

MARK = "<!-- tables -->"


class Cell(Strict):
    """The `largest` micro-batch that fits where one more does not; 0: none; None: why it is not known."""

    model: str
    gpu: str
    gpus: int
    way: str
    strategy: str
    largest: NonNegativeInt | None
    why: str | None


def strategy(way: str, gpus: int) -> str:
    """As `bigdit bench memory --strategy` takes it."""
    return f"{'single' if gpus == 1 else f'fsdp2,world_size={gpus}'},{WAYS[way]}"


def cells() -> Iterator[Cell]:
    """All of them, by cards: those of one kind share a process."""
    for name, gpus in CARDS:
        card = catalog.resolve_gpu(name)
        beside = beside_torch(card.compute_capability, gpus, None, card.multiprocessors)
        with Cards(card) as cards:
            for model in MODELS:
                guess = 1
                for way in WAYS:
                    cards.unanswered.clear()
                    text = strategy(way, gpus)
                    rows = [(sized(model, card, text), guess)]
                    (largest,) = cards.largest(rows, card.usable_bytes - beside.high_bytes)
                    guess = max(largest or 0, 1)
                    yield Cell(
                        model=model,
                        gpu=name,
                        gpus=gpus,
                        way=way,
                        strategy=text,
                        largest=largest,
                        why=next(iter(cards.unanswered), None),
                    )


def sized(model: str, card: catalog.Gpu, text: str) -> Callable[[int], RehearsalRequest]:
    """The request of a model's strategy by its micro-batch size."""
    found, asked = catalog.find_model(model), parse_strategy([text])
    return lambda size: request_for(found, card, asked.with_micro_batch_size(size))


def page(found: list[Cell]) -> str:
    """A table a way, a row a model."""
    lines = []
    for way in WAYS:
        heads = [name if gpus == 1 else f"{gpus} × {name}" for name, gpus in CARDS]
        lines += [f"## {way}", "", f"| model | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(CARDS)]
        for model in MODELS:
            row = [_shown(found, model, way, *card) for card in CARDS]
            lines.append(f"| {model} | {' | '.join(row)} |")
        lines.append("")
    unknown = [each for each in found if each.largest is None]
    lines += [f"- {each.model}, {each.way}, {each.gpus} × {each.gpu}: {each.why}" for each in unknown]
    return "\n".join(lines)


def _shown(found: list[Cell], model: str, way: str, gpu: str, gpus: int) -> str:
    for each in found:
        if (each.model, each.way, each.gpu, each.gpus) == (model, way, gpu, gpus):
            return "?" if each.largest is None else str(each.largest or "–")
    return ""


def main() -> None:
    text = PAGE.read_text()
    if MARK not in text:
        raise UserError(f"{PAGE} has no line {MARK}, below which the tables go")
    found: list[Cell] = []
    for cell in cells():
        found.append(cell)
        print(f"{cell.model}, {cell.gpus} × {cell.gpu}, {cell.way}: {cell.largest}", flush=True)
        write_json(FOUND, [each.model_dump(mode="json") for each in found])
    write_text(PAGE, f"{text.partition(MARK)[0]}{MARK}\n\n{page(found)}")


if __name__ == "__main__":
    sys.exit(guard(main))
