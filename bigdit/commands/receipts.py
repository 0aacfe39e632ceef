"""`bigdit receipts`: what runs of this machine took, and how far off emulated memory and estimated seconds are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit.commands.options import Json

if TYPE_CHECKING:
    from bigdit.catalog import Gpu
    from bigdit.receipt import Receipt

HELP = "What earlier runs took, and how far off plans are."

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)

Card = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Of this GPU alone.")]
Folder = Annotated[
    Path | None,
    typer.Option("--receipts", metavar="DIR", help="The folder; those that plans read if left out."),
]


@app.command("list")
def show(gpu: Card = None, receipts: Folder = None, as_json: Json = False) -> None:
    """All receipts: when, which model and GPU, reserved bytes, seconds a step."""
    from bigdit import log
    from bigdit.report.receipts import listed
    from bigdit.units import how_many

    found = _read(receipts)
    of_cards = None if gpu is None else _cards(found, gpu)
    own = [each for each in found if of_cards is None or each.device in of_cards]
    if as_json:
        log.emit_json([each.model_dump(mode="json") for each in own])
    elif own:
        log.out.print(listed(own))
    elif found:
        log.notice(f"none of {how_many(len(found), 'receipt')} is of {gpu}")


@app.command()
def compare(gpu: Card = None, receipts: Folder = None, as_json: Json = False) -> None:
    """Compare each receipt with an emulated GPU, and show what plans take from all of a GPU: margin and speed."""
    from bigdit import log
    from bigdit.profile.cards import Cards
    from bigdit.report.receipts import compared, summary
    from bigdit.search.calibration import check, memory_margin, of_gpu, step_ratio
    from bigdit.units import how_many

    found = _read(receipts)
    cards = _cards(found, gpu)
    document = []
    for device, card in cards.items():
        with log.err.status(f"running what the {device} ran on an emulated one"), Cards(card) as emulated:
            own = [*of_gpu(found, card), *of_gpu(found, card, emulated=True)]
            checked, notices = check(own, card, emulated)
        lines = summary(checked)
        margin = memory_margin(checked)
        if margin is not None:
            lines.append(f"plans for this card take {margin.share:.1%} more memory into account: {margin.source}")
        kinds = [step_ratio(checked, each.receipt.strategy) for each in checked]
        lines += dict.fromkeys(f"their speed is calibrated by {kind.source}" for kind in kinds if kind is not None)
        for line in notices:
            log.notice(f"note: {line}")
        if not as_json and checked:
            log.out.print(compared(checked))
            for line in lines:
                log.out.print(line, highlight=False)
        document += [
            {
                "model": each.receipt.model.name,
                "device": device,
                "emulated": each.receipt.emulated,
                "measured_peak_reserved_bytes": each.receipt.measured_peak_reserved_bytes,
                "predicted_peak_reserved_bytes": each.peak_reserved_bytes,
                "seconds_per_step": None if each.receipt.emulated else each.receipt.seconds_per_step,
                "predicted_seconds_per_step": asdict(each.step.seconds),
            }
            for each in checked
        ]
    if as_json:
        log.emit_json(document)
    elif not document:
        whose = "a GPU" if gpu is None else gpu
        log.notice(f"none of {how_many(len(found), 'receipt')} is of {whose} with one shape of batches")


@app.command()
def calibrate(gpu: Card = None, receipts: Folder = None, as_json: Json = False) -> None:
    """Show what plans take from a GPU's receipts: the safety margin of memory, and the factor of speed."""
    from bigdit import log
    from bigdit.errors import UserError
    from bigdit.profile.cards import Cards
    from bigdit.report.receipts import margins, speeds
    from bigdit.search.calibration import check, learnt, left_out, of_gpu
    from bigdit.units import how_many

    found = _read(receipts)
    learned = []
    for card in {card.name: card for card in _cards(found, gpu).values()}.values():
        with log.err.status(f"running what the {card.title} ran on an emulated one"), Cards(card) as emulated:
            checked, notices = check(of_gpu(found, card), card, emulated)
        for line in [*left_out(found, card), *notices]:
            log.notice(f"note: {line}")
        if checked:
            learned.append(learnt(card, checked))
    if not learned:
        raise UserError(
            f"receipts calibrate: none of {how_many(len(found), 'receipt')} is usable of "
            f"{'any GPU' if gpu is None else gpu}; one that `bigdit train` wrote on a GPU, with one shape of "
            "batches, was expected (--receipts DIR)"
        )
    if as_json:
        log.emit_json([each.model_dump(mode="json") for each in learned])
        return
    log.out.print(margins(learned))
    log.out.print()
    log.out.print(speeds(learned))


def _cards(receipts: list[Receipt], wanted: str | None) -> dict[str, Gpu]:
    """The cards of the catalogue that these are of, by their drivers' names; a line for each that it does not have."""
    from bigdit import catalog, log
    from bigdit.errors import UserError

    name = None if wanted is None else catalog.resolve_gpu(wanted).name
    cards = {}
    for device in sorted({each.device for each in receipts} - {"cpu"}):
        try:
            card = catalog.gpu(device)
        except UserError as error:
            log.notice(f"note: receipts of {device} are left out: {error}")
            continue
        if name in (None, card.name):
            cards[device] = card
    return cards


def _read(folder: Path | None) -> list[Receipt]:
    from bigdit import log
    from bigdit.errors import UserError
    from bigdit.search.calibration import folders, read

    if folder is not None and not folder.is_dir():
        raise UserError(f"--receipts: {folder} is no folder; one with receipts, as training writes them, was expected")
    places = folders(folder)
    found, notices = read(places)
    for line in notices:
        log.notice(f"note: {line}")
    if not found:
        log.notice(f"no receipts in {', '.join(map(str, places))}; `bigdit train` leaves one where there is a GPU")
    return found
