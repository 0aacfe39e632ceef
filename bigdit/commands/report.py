"""`bigdit report`: the page of a run, at any time of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigdit.commands.options import Json


def run(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The output of a run, as its config has it.")],
    as_json: Json = False,
) -> None:
    """Write a run's report.html into its output: curves, memory by phase against the plan, pictures, settings."""
    from bigdit import log
    from bigdit.report.run import read_run, write_page

    found = read_run(output)
    for line in found.notices:
        log.notice(f"note: {line}")
    if as_json:
        log.emit_json(found.document())
    else:
        log.notice(f"wrote {write_page(found)}")
