"""How long a save keeps the training step waiting: writes benchmarks/saving.md.

python benchmarks/saving.py [MODEL [BLOCKS [ROUNDS]]]

One process on the CPU trains MODEL of the catalogue (sana-1600m), cut to BLOCKS blocks (0: whole), with AdamW in bf16.
Each round takes, one after another: a step; the copy of the state to the host alone; a save, of which the time until
it returns counts; a step while the thread writes; and waits for the thread.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bigdit import catalog, checkpoint, engines, log, models
from bigdit.dist import World
from bigdit.engines.state import checkpoint_bytes, places
from bigdit.files import write_text
from bigdit.rehearse.ask import request_for
from bigdit.rehearse.data import batch
from bigdit.rehearse.unwritten import unwritten_weights
from bigdit.search.sibling import depths, sibling
from bigdit.spec import ObjectiveSpec, Strategy
from bigdit.train.step import train_step
from bigdit.units import gib

PAGE = Path(__file__).with_suffix(".md")
COPY, SAVE = "the copy to the host alone", "a save, until it returns"
ROW = "| {:42} | {:>8} | {:>8} |"


def main(name: str = "sana-1600m", blocks: str = "0", rounds: str = "5") -> None:
    log.quiet_libraries()
    model = catalog.find_model(name)
    if int(blocks):
        model = sibling(model, {key: min(int(blocks), length) for key, length in depths(model).items()})
    request = request_for(model, catalog.resolve_gpu("a40"), Strategy())
    strategy, family, cpu = request.strategy, models.family(model.spec.class_name), torch.device("cpu")
    with unwritten_weights():
        module = models.build(model.spec, device="cpu", dtype=engines.compute_dtype(strategy))
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.02)
    params = sum(map(torch.numel, module.parameters()))
    engine = engines.create(strategy, module, family, device=cpu, world=World())

    def step() -> None:
        train_step(engine, family, ObjectiveSpec(), [batch(request.batch, strategy)], lr=1e-6)

    def copy() -> None:
        held = [place.tensor.to("cpu", copy=True) for place in places(engine, None, 0).values()]
        assert held

    step()  # the optimizer's state comes with it
    described = {"model": model.spec.model_dump(), "strategy": strategy.model_dump(), "run": {}, "data": None}
    took: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        saver = checkpoint.Saver(Path(folder), checkpoint.Peers(), checkpoint.Keeping(1))
        for number in range(1, int(rounds) + 1):
            timed(took, "a step", step)
            timed(took, COPY, copy)
            timed(took, SAVE, functools.partial(saver.save, engine, None, number, described))
            timed(took, "a step while the thread writes", step)
            timed(took, "the rest of the writing", saver.wait)
    page(f"{model.spec.name}, {params:,} parameters", checkpoint_bytes(engine, None), took)


def timed(took: dict[str, list[float]], what: str, action: Callable[[], object]) -> None:
    began = time.perf_counter()
    action()
    took.setdefault(what, []).append(time.perf_counter() - began)


def page(what: str, nbytes: int, took: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    step = medians["a step"]
    rounds = len(took["a step"])
    rows = [ROW.format(name, f"{seconds:.2f}", f"{seconds / step:.3f}") for name, seconds in medians.items()]
    lines = [
        "# What a save keeps waiting",
        "",
        f"Made by `python benchmarks/{Path(__file__).name} {' '.join(sys.argv[1:])}`: {what},",
        f"AdamW in bf16 by one process on a CPU, {gib(nbytes)} of state. Medians of {rounds} rounds, in which the",
        "rows follow each other. On a card the step is shorter and the copy crosses PCIe; the ratio of a save to the",
        "copy stays.",
        "",
        ROW.format("", "s", "of a step"),
        "| --- | --- | --- |",
        *rows,
        "",
        f"A save returns after {medians[SAVE] / medians[COPY]:.2f} copies.",
    ]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    write_text(PAGE, text)
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
