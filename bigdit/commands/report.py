"""`bigdit report`: the page of a run, also while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigdit import log
from bigdit.commands import Json


def run(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The output folder of a run.")],
    as_json: Json = False,
) -> None:
    """Write report.html into a run's output: curves, memory by phase against the plan, images and settings."""
    from bigdit.report.run import read_run, write_page

    found = read_run(output)
    for line in found.notices:
        log.notice(f"note: {line}")
    if as_json:
        log.emit_json(found.document())
    else:
        log.notice(f"wrote {write_page(found)}")
