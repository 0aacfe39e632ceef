"""`bigdit receipts`: measured memory and time of runs, and the errors of their predictions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit import log
from bigdit.commands import Json
from bigdit.errors import UserError
from bigdit.units import how_many

if TYPE_CHECKING:
    from bigdit.catalog import Gpu
    from bigdit.receipt import Receipt

HELP = "Compare measured memory and time of runs with plans."

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)

GpuName = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Only receipts of this GPU.")]
Folder = Annotated[
    Path | None,
    typer.Option("--receipts", metavar="DIR", help="Folder of receipts. Default: those that plans read."),
]


@app.command("list")
def show(gpu: GpuName = None, receipts: Folder = None, as_json: Json = False) -> None:
    """List all receipts: date, model, GPU, reserved bytes, seconds per step."""
    from bigdit.report.receipts import listed

    found = _read(receipts)
    names = None if gpu is None else _gpus(found, gpu)
    own = [each for each in found if names is None or each.device in names]
    if as_json:
        log.emit_json([each.model_dump(mode="json") for each in own])
    elif own:
        log.out.print(listed(own))
    elif found:
        log.notice(f"{how_many(len(found), 'receipt')}, none of {gpu}")


@app.command()
def compare(gpu: GpuName = None, receipts: Folder = None, as_json: Json = False) -> None:
    """Compare each receipt with an emulated GPU, and show what plans learn: the safety margin and the speed."""
    from bigdit.profile.gpus import EmulatedGpus
    from bigdit.report.receipts import compared, summary
    from bigdit.search.calibration import Calibration, check, of_gpu

    found = _read(receipts)
    gpus = _gpus(found, gpu)
    document = []
    for device, target in gpus.items():
        with log.err.status(f"repeating the runs of the {device} on an emulated one"), EmulatedGpus(target) as emulated:
            own = [*of_gpu(found, target), *of_gpu(found, target, emulated=True)]
            checked, notices = check(own, emulated)
        lines = summary(checked)
        calibration = Calibration(checked)
        if (margin := calibration.measured_margin) is not None:
            lines.append(f"plans for this GPU have a safety margin of {margin.share:.1%}: {margin.source}")
        kinds = [calibration.ratio(each.receipt.strategy) for each in checked]
        lines += dict.fromkeys(f"their speed is calibrated: {kind.source}" for kind in kinds if kind is not None)
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
        log.notice(f"{how_many(len(found), 'receipt')}, none of {whose} with one shape of batches")


def _gpus(receipts: list[Receipt], wanted: str | None) -> dict[str, Gpu]:
    """The catalogue's GPUs of these receipts, by their drivers' names; unknown ones are logged."""
    from bigdit import catalog

    name = None if wanted is None else catalog.resolve_gpu(wanted).name
    gpus = {}
    for device in sorted({each.device for each in receipts} - {"cpu"}):
        try:
            target = catalog.gpu(device)
        except UserError as error:
            log.notice(f"note: receipts of {device} are left out: {error}")
            continue
        if name in (None, target.name):
            gpus[device] = target
    return gpus


def _read(folder: Path | None) -> list[Receipt]:
    from bigdit.search.calibration import folders, read

    if folder is not None and not folder.is_dir():
        raise UserError(f"--receipts: {folder} is no folder; one with receipts of training was expected")
    places = folders(folder)
    found, notices = read(places)
    for line in notices:
        log.notice(f"note: {line}")
    if not found:
        log.notice(f"no receipts in {', '.join(map(str, places))}; `bigdit train` writes one on a machine with a GPU")
    return found
