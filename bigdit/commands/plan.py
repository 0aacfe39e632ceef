"""`bigdit plan`: will it fit, how fast, what must be set, and why."""

from __future__ import annotations

from pathlib import Path
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
    Json,
    Lora,
    Model,
    Network,
    Optimizer,
    Precision,
    Price,
    Receipts,
    Resolutions,
)

EXIT_DOES_NOT_FIT = 2


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
    checkpointed_blocks: Annotated[
        str | None, typer.Option(metavar="K", help="Fix how many blocks are recomputed: a number, or all.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(metavar="N", help="Fix the samples of a card in one pass.")] = None,
    ema: Ema = None,
    ema_widths: EmaWidths = None,
    lora: Lora = None,
    features: Features = None,
    full: Full = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the way from the setting that people copy to the recommended one.")
    ] = False,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write plan.yaml, ds_config.json and report.html to DIR.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Plan a training: whether it fits the cards, how fast it goes, what to set, and why.

    Exit status: 0 where it fits or is tight, 2 where it does not fit, 1 for what cannot be asked.
    """
    from bigdit import log
    from bigdit.search.asking.ask import question_for

    question = question_for(
        model,
        gpu,
        gpu_memory=gpu_memory,
        gpus=gpus,
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
        checkpointed_blocks=checkpointed_blocks,
        micro_batch=micro_batch,
        ema=ema,
        ema_widths=ema_widths,
        lora=lora,
        features=features,
        full=full,
        explain=explain,
        device=device,
    )
    from bigdit.report.plan import show
    from bigdit.search.answer import make_plan

    with log.err.status(f"planning the training of {question.model.name}") as status:
        plan = make_plan(question, progress=status.update)
    if out is not None:
        from bigdit.report.folder import write_plan  # here: it draws, and imports what draws

        log.notice(f"wrote {out}: {', '.join(file.name for file in write_plan(plan, out))}")
    if as_json:
        log.emit_json(plan.model_dump(mode="json", exclude={"packed_timeline", "settings"}) | {"fits": plan.fits})
    else:
        show(plan, out)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT
