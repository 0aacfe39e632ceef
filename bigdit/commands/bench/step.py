"""`bigdit bench step`: a run's real step, its memory beside the prediction, its time beside a plain PyTorch loop's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit.commands.options import Config, Json, Set, Stage

if TYPE_CHECKING:
    from bigdit.receipt import Receipt


def run(
    config: Config,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    stage: Stage = None,
    steps: Annotated[int, typer.Option(min=3, metavar="N", help="Real steps; the first two are not timed.")] = 8,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the receipt to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Run a run's step in one process on this machine: its memory, on a GPU also predicted, and its time.

    Steps are interleaved with those of a plain loop. That is PyTorch alone: the same model, values, batches, precision,
    loss and optimizer, and no engine.
    """
    from bigdit import libraries, log
    from bigdit.train.prepare import check_store, prepare

    libraries.prepare()
    from bigdit.catalog.families import objective_of
    from bigdit.config import load_run
    from bigdit.receipt import keep, write

    one_process = ["strategy.engine=single", "strategy.world_size=1", "strategy.ds_config=null"]
    run_config = load_run(config, [*overrides, *one_process], stage)
    spec, strategy = prepare(run_config), run_config.strategy
    check_store(run_config)
    from bigdit.bench.step import bench_step
    from bigdit.report.bench import comparison_table, load_line, overhead, print_notes
    from bigdit.store import FeatureStore
    from bigdit.train.data import largest_batch_shape

    shape = largest_batch_shape(FeatureStore.open(run_config.data.store))
    objective = objective_of(spec, run_config.objective)
    found = bench_step(spec, shape, strategy, objective, steps=steps, seed=run_config.train.seed)
    receipt, compared = found.receipt, found.compared
    if as_json:
        plain = None if compared is None else compared.model_dump(mode="json")
        log.emit_json(receipt.model_dump(mode="json") | {"compared": plain})
    else:
        if compared is not None:
            log.out.print(load_line(compared.load), highlight=False)
        _print(receipt)
        log.out.print()
        if compared is not None:
            log.out.print(comparison_table(compared))
            ratio = compared.contenders[1].of_baseline
            assert ratio is not None  # which the baseline alone has not
            told = "not told, since this machine is busy" if compared.load.busy else overhead(ratio)
            log.out.print(f"overhead of bigdit's step: {told}", highlight=False)
            print_notes(compared)
        else:
            log.out.print(f"not compared with a plain loop: {found.alone}", highlight=False)
    if out is None:
        keep(receipt)
    else:
        write(receipt, out)
        log.notice(f"wrote {out}")


def _print(receipt: Receipt) -> None:
    from bigdit import log
    from bigdit.report.tables import table
    from bigdit.units import gib

    where = f"an emulated {receipt.device}" if receipt.emulated else receipt.device
    rows = table(f"one process on {where}, micro-batch {receipt.strategy.micro_batch_size}", ["", "value"])
    found = {
        "peak, predicted": receipt.predicted_peak_allocated_bytes,
        "peak, measured": receipt.measured_peak_allocated_bytes,
        "reserved, predicted": receipt.predicted_peak_reserved_bytes,
        "reserved, measured": receipt.measured_peak_reserved_bytes,
    }
    for name, nbytes in found.items():
        if nbytes is not None:
            by = f"; {receipt.measured_with}" if name == "peak, measured" else ""
            rows.add_row(name, f"{gib(nbytes)} ({nbytes} bytes{by})")
    if receipt.error_percent is not None:
        rows.add_row("peak off by", f"{receipt.error_percent} %")
    if not receipt.emulated:  # whose kernels are not run
        rows.add_row("a step", f"{receipt.seconds_per_step} s, {receipt.samples_per_second} samples/s")
    log.out.print(rows)
