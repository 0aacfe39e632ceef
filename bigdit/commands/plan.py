"""`bigdit plan`: will it fit, how fast, what must be set, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigdit.commands.options import RESOLUTION, Device, Frames, Gpu, Json, Model

EXIT_DOES_NOT_FIT = 2


def run(
    model: Model,
    gpu: Gpu,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The card's used + free in nvidia-smi, such as 45416MiB.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="Cards in all; 1 if left out.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(metavar="N", help="Cards in a machine; 8 if left out.")] = None,
    network: Annotated[
        float | None, typer.Option(metavar="GB/S", help="10^9 bytes a second between machines; 12.5 if left out.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of one machine: 128GiB; this one's for --gpu auto, else 64 GiB a card."),
    ] = None,
    resolution: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PIXELS",
            help=f"{RESOLUTION} Of several, with commas or by repetition, the first decides, and the others are "
            "buckets.",
        ),
    ] = None,
    buckets: Annotated[
        str | None,
        typer.Option(
            metavar="PIXELS",
            help="Further sizes whose largest micro-batch is wanted, or none; of pictures the usual aspect ratios, if "
            "left out (aspect).",
        ),
    ] = None,
    frames: Frames = None,
    global_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Samples in an optimizer step over all cards.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(metavar="N", help="Samples of the data set: 250000, 1.5k, 30M; for time and disk.")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(metavar="N", help="How often each is trained on; once if left out.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="MONEY", help="Of one card for an hour, in your currency.")
    ] = None,
    receipts: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Receipts of measured runs, to calibrate the speed by.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Fix the engine: single, zero0 to zero3, zero2-offload, fsdp2, …")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Fix the optimizer: adamw, adamw_8bit, came, …")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Fix the precision: bf16, bf16_sr, fp16, tf32, fp32.")
    ] = None,
    checkpointed_blocks: Annotated[
        str | None, typer.Option(metavar="K", help="Fix how many blocks are recomputed: a number, or all.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(metavar="N", help="Fix the samples of a card in one pass.")] = None,
    ema: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Keep a moving average: auto, gpu or cpu; none if left out.")
    ] = None,
    lora: Annotated[int | None, typer.Option(metavar="RANK", help="Train adapters of this rank.")] = None,
    features: Annotated[
        str | None, typer.Option(metavar="WHEN", help="cached (if left out), or online: encode while training.")
    ] = None,
    full: Annotated[bool | None, typer.Option("--full", help="Train all weights: propose no adapters instead.")] = None,
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
