"""`bigdit plan`: what the training step takes on a card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bigdit.commands.options import Json

if TYPE_CHECKING:
    from bigdit.search import Plan

EXIT_DOES_NOT_FIT = 2


def run(
    model: Annotated[str, typer.Option(help="A model of `bigdit models`, or a diffusers config.json.")],
    gpu: Annotated[str, typer.Option(help="A card of `bigdit gpus`.")],
    resolution: Annotated[int | None, typer.Option(min=1, help="Pixels a side; the model's own if left out.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw or adamw_8bit.")] = "adamw",
    precision: Annotated[str, typer.Option(help="bf16 (with fp32 master weights) or fp32.")] = "bf16",
    checkpointed_blocks: Annotated[str, typer.Option(metavar="K", help="The first K blocks, or all.")] = "0",
    as_json: Json = False,
) -> int:
    """Rehearse the training step on a fake GPU and hold its memory against the card's."""
    from pydantic import ValidationError

    from bigdit import catalog, log
    from bigdit.errors import UserError
    from bigdit.search import make_plan
    from bigdit.spec import Strategy

    wanted = {
        "optimizer": {"name": optimizer},
        "precision": precision,
        "checkpointed_blocks": int(checkpointed_blocks) if checkpointed_blocks.isdigit() else checkpointed_blocks,
        "gradient_clipping": 1.0,
    }
    try:
        strategy = Strategy.model_validate(wanted)
    except ValidationError as error:
        raise UserError(
            *(
                f"--{str(detail['loc'][0]).replace('_', '-')}: {detail['msg']}; {detail['input']!r} was found"
                for detail in error.errors()
            )
        ) from None
    chosen_model, chosen_gpu = catalog.find_model(model), catalog.gpu(gpu)
    with log.err.status(f"rehearsing the training step of {chosen_model.name}"):
        plan = make_plan(chosen_model, chosen_gpu, strategy, resolution=resolution)
    if as_json:
        log.emit_json(plan.model_dump(mode="json") | {"fits": plan.fits})
    else:
        _show(plan, chosen_gpu.title)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _show(plan: Plan, card: str) -> None:
    from bigdit import log
    from bigdit.report import plan as report
    from bigdit.units import count, gib

    ledgers = {size.micro_batch_size: size.ledger for size in plan.sizes}
    strategy, latents = plan.strategy, plan.batch.latents
    blocks = strategy.checkpointed_blocks
    log.out.print(f"[bold]{plan.model}[/bold], {count(plan.params)} parameters, on one {card}", highlight=False)
    text = f", text {plan.batch.text[0]} × {plan.batch.text[1]}" if plan.batch.text else ""
    log.out.print(f"a sample: latents {' × '.join(map(str, latents))}{text}", highlight=False)
    log.out.print(
        f"one process, {strategy.precision}{' with fp32 masters' if strategy.precision == 'bf16' else ''}, "
        f"{strategy.optimizer.name}, checkpointed blocks: {blocks or 'none'}, cached features\n",
        highlight=False,
    )
    log.out.print(report.phases(ledgers))
    log.out.print()
    log.out.print(report.at_peak(ledgers))
    log.out.print()
    if plan.fits:
        log.out.print(
            f"largest micro-batch below the card's {gib(plan.usable_bytes)}: "
            f"[bold]{plan.largest_micro_batch_size}[/bold], at "
            f"{gib(plan.largest_peak_bytes)} (each phase continued by its line through the two sizes)",
            highlight=False,
        )
    else:
        log.out.print(
            f"[bold]does not fit[/bold]: a micro-batch of 1 takes {gib(plan.largest_peak_bytes)} of the card's "
            f"{gib(plan.usable_bytes)}; {_nearest_fix(plan)}",
            highlight=False,
        )
    log.out.print(
        f"headroom: {gib(plan.headroom_bytes)}; out of it come the CUDA context and what the allocator loses to "
        "fragmentation, which this plan does not count yet and `bigdit rehearse` does",
        highlight=False,
    )


def _nearest_fix(plan: Plan) -> str:
    """What of the choices here takes less, if it is not chosen already."""
    choices = []
    if plan.strategy.optimizer.name != "adamw_8bit":
        choices.append("--optimizer adamw_8bit")
    if plan.strategy.checkpointed_blocks != "all":
        choices.append("--checkpointed-blocks all")
    return f"less: {' and '.join(choices)}, or a larger card" if choices else "a larger card is needed"
