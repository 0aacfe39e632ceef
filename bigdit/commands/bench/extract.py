"""`bigdit bench extract`: extraction of a run's pictures, against a loop that encodes one after another."""

from __future__ import annotations

from typing import Annotated

import typer

from bigdit.commands.options import Config, Json, Out, Rounds, Set, Stage


def run(
    config: Config,
    overrides: Set = [],  # noqa: B006  # typer reads the default; it is not changed
    stage: Stage = None,
    pictures: Annotated[int, typer.Option(min=1, metavar="N", help="The first so many of data.images.")] = 256,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that encode; default: data.workers.")] = None,
    rounds: Rounds = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Pictures a second from a run's sources into a store, by turns with a plain loop over the same pictures.

    The loop opens, crops, encodes and saves them one by one. Both write into the system's temporary folder (TMPDIR),
    which is left empty.
    """
    from bigdit import libraries, log

    libraries.prepare()
    from bigdit.catalog.resolve import model_spec
    from bigdit.config import check, load_run
    from bigdit.errors import UserError
    from bigdit.numbers import MOST_PROCESSES

    run_config = load_run(config, overrides, stage)
    model = model_spec(run_config.model)
    check(run_config, model)
    processes = workers or run_config.data.workers
    if processes > MOST_PROCESSES:
        raise UserError(f"--workers is {processes}, and at most {MOST_PROCESSES} processes are started")
    from bigdit.bench.extract import bench_extract
    from bigdit.report.comparison import show
    from bigdit.search.encoding import with_batch_size

    run_config = with_batch_size(run_config, processes)
    with log.err.status("opening the sources") as status:
        found = bench_extract(
            run_config, model, pictures=pictures, workers=processes, rounds=rounds, said=status.update
        )
    show(found, out, as_json=as_json)
