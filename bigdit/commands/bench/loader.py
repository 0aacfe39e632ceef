"""`bigdit bench loader`: the loader on a run's store, against torch's DataLoader."""

from __future__ import annotations

from typing import Annotated

import typer

from bigdit.commands.options import Config, Json, Out, Rounds, Set, Stage


def run(
    config: Config,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    stage: Stage = None,
    batches: Annotated[int, typer.Option(min=1, metavar="N", help="Micro-batches of a turn.")] = 100,
    rounds: Rounds = 7,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Micro-batches a second from a run's store, by turns with torch's DataLoader over the same samples.

    It has as many worker processes as the loader has threads (data.read_threads).
    """
    from bigdit import libraries, log
    from bigdit.config import load_run
    from bigdit.train.prepare import check_store

    run_config = load_run(config, overrides, stage)
    check_store(run_config)
    libraries.prepare()
    from bigdit.bench.loader import bench_loader
    from bigdit.report.comparison import show

    with log.err.status("reading") as status:
        found = bench_loader(run_config, batches=batches, rounds=rounds, said=status.update)
    show(found, out, as_json=as_json)
