"""`bigdit extract`: encode the pictures and captions of a run into its feature store."""

from __future__ import annotations

from typing import Annotated

import typer

from bigdit.commands.options import Config, Json, Set


def run(
    config: Config,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that encode; default: data.workers.")] = None,
    as_json: Json = False,
) -> None:
    """Encode pictures and captions once, in parallel; the same command goes on where it stopped."""
    from bigdit import log

    log.quiet_libraries()
    from bigdit.catalog.resolve import model_spec
    from bigdit.config import check, load_run
    from bigdit.features.extract import extract
    from bigdit.features.report import FILE as REPORT
    from bigdit.search.encode_batch import with_batch_size
    from bigdit.units import duration

    run_config = load_run(config, overrides)
    model = model_spec(run_config.model)
    check(run_config, model)
    run_config = with_batch_size(run_config, workers or run_config.data.workers)
    report = extract(run_config, model, workers)
    if as_json:
        log.emit_json(report.model_dump(mode="json"))
        return
    buckets = ", ".join(f"{count} of {shape}" for shape, count in report.buckets.items())
    speed = f"{report.images_per_s:.1f} images/s" if report.workers else "nothing was left to do"
    print(f"{report.features}: {report.encoded} of {report.pictures} pictures encoded ({buckets})")
    print(f"{duration(report.seconds)}, {speed}; report: {report.features / REPORT}")
    if report.skipped:
        print(f"{len(report.skipped)} skipped:")
        for item in report.skipped[:10]:
            print(f"  {item.name}: {item.reason}")
        if len(report.skipped) > 10:
            print(f"  and {len(report.skipped) - 10} more in the report")
