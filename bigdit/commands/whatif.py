"""`bigdit whatif`: a plan's page, live: each change of a slider or a choice runs."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from bigdit.commands.options import (
    Buckets,
    Device,
    Ema,
    EmaWidths,
    Engine,
    Epochs,
    Features,
    Frames,
    Full,
    GlobalBatch,
    Gpu,
    GpuMemory,
    Gpus,
    GpusPerNode,
    HostMemory,
    Images,
    Lora,
    Model,
    Network,
    Optimizer,
    Precision,
    Price,
    Receipts,
    Resolutions,
)

NEEDED = ("starlette", "uvicorn")


def run(
    model: Model,
    gpu: Gpu,
    gpu_memory: GpuMemory = None,
    gpus: Gpus = None,
    gpus_per_node: GpusPerNode = None,
    network: Network = None,
    host_memory: HostMemory = None,
    resolution: Resolutions = None,
    buckets: Buckets = None,
    frames: Frames = None,
    global_batch: GlobalBatch = None,
    images: Images = None,
    epochs: Epochs = None,
    price: Price = None,
    receipts: Receipts = None,
    engine: Engine = None,
    optimizer: Optimizer = None,
    precision: Precision = None,
    ema: Ema = None,
    ema_widths: EmaWidths = None,
    lora: Lora = None,
    features: Features = None,
    full: Full = None,
    device: Device = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="N", help="Of 127.0.0.1; a free one if left out.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address alone.")] = False,
) -> None:
    """Plan a training, and open the plan's page from a small server of this machine: each change of it runs.

    It ends with Ctrl-C. Only who has the address, which holds a token, is answered.
    """
    from bigdit import log
    from bigdit.errors import UserError

    if not all(map(importlib.util.find_spec, NEEDED)):
        raise UserError("bigdit whatif: starlette or uvicorn is missing; pip install 'bigdit[whatif]'")

    import functools

    from bigdit.live.serve import ended_in_order, listening, serve
    from bigdit.live.start import live_page
    from bigdit.search.asking.ask import question_for

    ask = functools.partial(
        question_for,
        model,
        gpu,
        gpu_memory=gpu_memory,
        gpus_per_node=gpus_per_node,
        network=network,
        host_memory=host_memory,
        resolution=resolution,
        buckets=buckets,
        frames=frames,
        global_batch=global_batch,
        images=images,
        epochs=epochs,
        price=price,
        receipts=receipts,
        engine=engine,
        optimizer=optimizer,
        precision=precision,
        ema=ema,
        ema_widths=ema_widths,
        lora=lora,
        features=features,
        full=full,
        device=device,
    )
    question = ask(gpus=gpus)
    with ended_in_order(), listening(port) as at:
        with log.status(f"planning the training of {question.model.name}") as status:
            page, answers = live_page(question, lambda count: ask(gpus=count), progress=status)
        with answers:
            serve(page, answers, at, browser=not no_browser)
