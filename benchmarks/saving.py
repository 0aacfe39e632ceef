"""How long a save delays the training step, and what CPU memory it takes: writes benchmarks/saving.md.

    python benchmarks/saving.py [--model MODEL] [--blocks BLOCKS] [--resolution PIXELS] [--strategy KEYS] [--rounds N]

One process on the CPU trains a model of the catalogue, cut to this many blocks. After a step, each round first copies
the state to CPU memory alone. Then it saves, times the save until it returns, and waits for the thread that writes.
Last comes a step while the thread writes. A save takes as much memory as this process's own pages grow until the
checkpoint is whole. An attempt of the same step on an emulated GPU predicts it.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from on_gpu.points import few_blocks

from bigdit import catalog, checkpoint, engines, libraries, models
from bigdit.config.strategy_text import parse_strategy
from bigdit.engines.state import state_slices
from bigdit.files import write_text
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.attempt import request_for
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.steps import batch
from bigdit.profile.unwritten import unwritten_weights
from bigdit.train.step import train_step
from bigdit.units import gib

PAGE = Path(__file__).with_suffix(".md")
STEP, COPY, SAVE = "a step", "the copy to the host alone", "a save, until it returns"


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a save keeps the step waiting, and what it takes.")
    parser.add_argument("--model", default="sana-1.5-3200m-1024")
    parser.add_argument("--blocks", type=int, default=26)
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--strategy", default="precision=bf16_sr,optimizer.name=came_8bit,optimizer_in_backward=true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    libraries.prepare()
    model = few_blocks(catalog.find_model(options.model), options.blocks)
    strategy = parse_strategy([options.strategy, "gradient_clipping=null"])
    gpu = catalog.resolve_gpu("a100-80g-sxm")
    request = request_for(model, gpu, strategy, resolution=options.resolution)
    with EmulatedGpus(gpu, 1) as cards:
        predicted = cards.attempt(request, counted="step").checkpoint_bytes
    family, cpu = models.family(model.spec.class_name), torch.device("cpu")
    with unwritten_weights():
        module = models.build(model.spec, device="cpu", dtype=engines.compute_dtype(strategy))
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.02)
    params = sum(map(torch.numel, module.parameters()))
    engine = engines.create(strategy, module, family, device=cpu)

    def step() -> None:
        train_step(engine, family, FlowMatchingSpec(), [batch(request.batch, strategy)], lr=1e-6)

    def copy() -> None:
        held = [place.tensor.to("cpu", copy=True) for place in state_slices(engine, None, 0).values()]
        assert held

    took: dict[str, list[float]] = {}
    timed(took, STEP, step)  # creates the optimizer's state, too
    described = {"model": model.spec.model_dump(), "strategy": strategy.model_dump(), "run": {}, "data": None}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        saver = checkpoint.Saver(Path(folder), checkpoint.Peers(), checkpoint.Keeping(1))
        with watched() as grown:
            saver.save(engine, None, 1, described)
            saver.wait()
        for number in range(2, options.rounds + 2):
            timed(took, COPY, copy)
            timed(took, SAVE, functools.partial(saver.save, engine, None, number, described))
            timed(took, "the writing, by a thread", saver.wait)
        saver.save(engine, None, options.rounds + 2, described)
        timed(took, "a step while the thread writes", step)
    how = f"{strategy.optimizer.name} in {strategy.precision}"
    page(f"{model.spec.name}, {params:,} parameters", how, predicted, grown[0], took)


@contextmanager
def watched() -> Iterator[list[int]]:
    """The most bytes by which this process's own pages grow in the `with` block. Known at its end."""
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory would be used again, and not be counted
    start, over, most = own_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], own_bytes() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def own_bytes() -> int:
    """Resident pages of this process that no file holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status has no RssAnon")


def timed(took: dict[str, list[float]], what: str, action: Callable[[], object]) -> None:
    began = time.perf_counter()
    action()
    took.setdefault(what, []).append(time.perf_counter() - began)


def page(what: str, how: str, predicted: int, grown: int, took: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    rows = [f"| {name:42} | {each:>8.2f} | {each / medians[STEP]:>8.3f} |" for name, each in medians.items()]
    command = " ".join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    text = f"""# What a save keeps waiting, and what it takes

Made by `{command}`:
{what}, {how}, by one process
on a CPU. Copies and saves are medians of {len(took[COPY])} rounds; steps were taken once, alone and beside the
writing. On a GPU the step is shorter and the copy crosses PCIe. The ratio of a save to the copy stays.

| {"":42} | {"s":>8} | {"of a step":>8} |
| --- | --- | --- |
{chr(10).join(rows)}

A save returns after {medians[SAVE] / medians[COPY]:.2f} copies.

Host memory of a save: {gib(predicted)} predicted ({predicted:,} bytes, `checkpoint_bytes` of an
attempt), {gib(grown)} measured ({grown:,} bytes, by which the process' own pages grew at
most): {grown / predicted:.3f} of it.
"""
    write_text(PAGE, text)
    print(text)


if __name__ == "__main__":
    main()
