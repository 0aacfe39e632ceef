"""`bigdit bench`: the real step on this machine, against its rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigdit.commands.options import Config, Json, Set


def run(
    config: Config,
    overrides: Set = [],  # noqa: B006
    steps: Annotated[int, typer.Option(min=3, help="Real steps; the first two are not timed.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Write the receipt to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Run the run's step in one process: memory predicted and measured, time a step."""
    from bigdit import libraries, log

    libraries.prepare()
    from bigdit.bench.step import bench_step, largest_batch_shape
    from bigdit.config import load_run
    from bigdit.receipt import keep, write
    from bigdit.report.tables import table
    from bigdit.train.prepare import prepare
    from bigdit.units import gib

    one_process = ["engine.name=single", "engine.processes=1", "engine.ds_config=null"]
    run_config = load_run(config, [*overrides, *one_process])
    spec, strategy = prepare(run_config, 1)
    shape = largest_batch_shape(run_config.data.features)
    receipt = bench_step(spec, shape, strategy, run_config.objective, steps=steps, seed=run_config.train.seed)
    if as_json:
        log.emit_json(receipt.model_dump(mode="json"))
    else:
        predicted, measured = receipt.predicted_peak_allocated_bytes, receipt.measured_peak_allocated_bytes
        assert predicted is not None  # by the benchmark both are
        assert measured is not None
        card = f"an emulated {receipt.device}" if receipt.emulated else receipt.device
        rows = table(f"one process on {card}, micro-batch {strategy.micro_batch_size}", ["", "value"])
        rows.add_row("peak, rehearsed", f"{gib(predicted)} ({predicted} bytes)")
        rows.add_row("peak, measured", f"{gib(measured)} ({measured} bytes; {receipt.measured_with})")
        rows.add_row("off by", f"{receipt.error_percent} %")
        reserved = receipt.predicted_peak_reserved_bytes, receipt.measured_peak_reserved_bytes
        if reserved[0] is not None and reserved[1] is not None:
            rows.add_row("reserved, rehearsed", f"{gib(reserved[0])} ({reserved[0]} bytes)")
            rows.add_row("reserved, measured", f"{gib(reserved[1])} ({reserved[1]} bytes)")
        if not receipt.emulated:  # whose kernels are not run
            rows.add_row("a step", f"{receipt.seconds_per_step} s, {receipt.images_per_second} images/s")
        log.out.print(rows)
    if out is None:
        keep(receipt)
    else:
        write(receipt, out)
        log.notice(f"wrote {out}")
