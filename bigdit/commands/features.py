"""`bigdit features`: inspect, verify and repair a latent and embedding cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigdit import log
from bigdit.commands import Json, Set
from bigdit.errors import EXIT_USER, UserError
from bigdit.units import gib, how_many

if TYPE_CHECKING:
    from bigdit.extract.verify import Damaged
    from bigdit.store.report import StoreReport
    from bigdit.store.schema import Known

HELP = "Inspect, verify and repair a latent and embedding cache."

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)

Folder = Annotated[Path, typer.Argument(metavar="FEATURES", help="The cache: data.features of the run.")]


@app.command()
def info(folder: Folder, as_json: Json = False) -> None:
    """Show counts, buckets, sizes, encoders, the speed of each worker, and what was truncated, skipped or leased."""
    from bigdit.extract.verify import open_schema
    from bigdit.store.growth import latest_schema
    from bigdit.store.report import store_report
    from bigdit.store.schema import EXTRACT

    schema = open_schema(folder)
    report = store_report(folder, schema)
    if as_json:
        log.emit_json(report.model_dump(mode="json"))
        return
    _print_info(report)
    if latest_schema(folder) != schema:
        log.say(f"changes of its sources are only partly encoded, and not used yet; {EXTRACT} finishes them")


@app.command()
def verify(
    folder: Folder,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes that read. Default: one per core.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Encode damaged parts again; needs --config.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The run's YAML, for --repair.")
    ] = None,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    as_json: Json = False,
) -> int:
    """Check every byte against its checksum. The exit status is 1 if damage was found and not repaired."""
    import os

    from bigdit import libraries
    from bigdit.extract.verify import verify as verify_store

    if repair and config is None:
        raise UserError("--repair encodes the damaged parts again with the run's encoders; add --config")
    libraries.prepare()
    count = workers or os.cpu_count() or 1
    report = verify_store(folder, count)
    mended = False
    if report.damaged and repair and config is not None:
        _repair(folder, config, overrides, workers, report.damaged)
        mended = True
        report = report.model_copy(update={"repaired": True})
    if as_json:
        log.emit_json(report.model_dump(mode="json"))
    else:
        for each in report.damaged:
            log.say(f"{each.file}: encoded again" if mended else each.problem)
        rate = gib(report.bytes / report.seconds)
        found = f"{len(report.damaged)} damaged, {report.missing} missing"
        log.say(f"{how_many(report.parts, 'part')}, {gib(report.bytes)}, {rate}/s; {found}")
    return EXIT_USER if report.damaged and not mended else 0


@app.command()
def clean(
    folder: Folder,
    other_machines: Annotated[
        bool,
        typer.Option(
            "--other-machines", help="Also remove leases of other machines: use it only if no extraction runs there."
        ),
    ] = False,
) -> None:
    """Remove incomplete files of dead workers.

    This machine cannot tell whether workers of other machines are dead: see --other-machines.
    """
    from bigdit.extract.verify import open_schema
    from bigdit.store.lease import remove_left

    open_schema(folder)
    left = remove_left(folder, other_machines=other_machines)
    for each in left:
        log.say(f"removed {each.folder.name}: {how_many(len(each.marks), 'part')} begun, {gib(each.nbytes)}")
    log.say(f"{how_many(len(left), 'folder')} of dead workers removed")


def _repair(folder: Path, config: Path, overrides: list[str], workers: int | None, damaged: list[Damaged]) -> None:
    """Remove the damaged files, and encode their samples again."""
    from bigdit.catalog.resolve import model_spec
    from bigdit.config.check import check
    from bigdit.config.stages import load_stages
    from bigdit.extract.extract import extract

    runs = [stage.run for stage in load_stages(config, overrides)]
    run = next((each for each in runs if each.data.features and each.data.features.resolve() == folder.resolve()), None)
    if run is None:
        named = ", ".join(dict.fromkeys(str(each.data.features) for each in runs))
        raise UserError(f"data.features is {named} in {config}, and {folder} was verified; name the same folder")
    model = model_spec(run.model)
    check(run, model)
    for each in damaged:
        try:
            (folder / each.file).unlink(missing_ok=True)
        except OSError as error:  # a folder, which may belong to somebody
            raise UserError(
                f"{folder / each.file} cannot be removed: {error.strerror}; remove it, and repair again"
            ) from None
    extract(run, model, workers, only=[(each.start, each.end) for each in damaged if each.end > each.start])


_SHARES = {
    "reading": "read",
    "encoding": "encode",
    "waiting": "wait",
    "cpu": "CPU",
    "gpu": "GPU",
    "io": "disk",
    "queue": "queue",
}
"""Column heads by the fields of Shares."""

_NAMED = 12
"""Class names that are shown."""


def _identity(report: StoreReport) -> dict[str, str]:
    """The sources and the encoders of a cache."""
    from bigdit.commands.extract import kind_of_samples

    found = {f"tokens {number}": each.line() for number, each in enumerate(report.lengths)}
    found |= {"bytes": ", ".join(f"{name} {gib(size)}" for name, size in report.bytes_by_column.items())}
    for number, source in enumerate(report.sources):
        samples = how_many(source["count"], kind_of_samples(report))
        found[f"source {number}"] = f"{source.get('kind')}: {samples}, digest {source.get('digest')}"
    for what, identity in (("image", report.codec), ("text", report.text_encoder)):
        if identity:
            found[what] = ", ".join(_flat("", identity))
    if report.classes is not None:
        found["classes"] = _classes(report.classes)
    return found


def _classes(known: Known) -> str:
    """`1000: n01440764, n01443537, …`, or the number of classes without names."""
    if isinstance(known, int):
        return f"{known}, without names"
    return f"{len(known)}: {', '.join(known[:_NAMED])}{', …' if len(known) > _NAMED else ''}"


def _flat(prefix: str, identity: dict[str, Any]) -> Iterator[str]:
    """`class_name AutoencoderDC`; nested keys are joined: `text_encoder.config 0123`."""
    for key, value in identity.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key} {value}"


def _print_info(report: StoreReport) -> None:
    from bigdit.commands.extract import encoded, kind_of_samples, print_skipped
    from bigdit.report.tables import lines, table
    from bigdit.store.text import cut_line

    parts = how_many(report.parts, "part")
    done = "whole" if report.parts_done == report.parts else f"{report.parts_done} of {parts} done"
    gone = f", {report.gone} removed or edited since" if report.gone else ""
    log.say(f"{report.features}: {done}; {encoded(report)}{gone}, {gib(report.bytes)}")
    log.out.print(lines("", _identity(report)), highlight=False)
    kinds = f"{kind_of_samples(report)}s"
    buckets = table("", ["bucket", kinds, "share"], numeric=[kinds, "share"])
    for shape, count in report.buckets.items():
        buckets.add_row(shape, str(count), f"{count / report.encoded:.1%}")
    log.out.print(buckets)
    columns = ["worker", "on", "parts", kinds, f"{kinds}/s", *_SHARES.values()]
    speeds = table("", columns, numeric=columns[2:])
    speeds.caption = (
        "% of a worker's time. read, encode, wait: its task;\n"
        "CPU, GPU, disk: what was busy; queue: it waited for a core"
    )
    for each in report.workers:
        shares = each.shares
        host, _, _, pid, _, _ = each.worker.rsplit("_", 5)
        speeds.add_row(
            f"{host} {pid}",
            each.device,
            str(each.parts),
            str(each.images),
            f"{each.images_per_s:.1f}",
            *(f"{100 * getattr(shares, name):.0f}" for name in _SHARES),
        )
    log.out.print(speeds)
    for held in report.at_work:
        what = {"alive": "is running", "dead": "is dead", "unknown": "runs or ran on another machine"}[held.fate]
        log.say(f"{held.worker} {what}; leased: {', '.join(held.parts)}, {gib(held.bytes)}")
    if any(held.fate != "alive" for held in report.at_work):
        log.say(f"`bigdit features clean {report.features}` removes what dead workers left; see --other-machines")
    for cut in report.cut:
        log.say(cut_line(cut, report.captions))
    print_skipped(report.skipped)
