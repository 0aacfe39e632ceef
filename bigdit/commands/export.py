"""`bigdit export`: a checkpoint's weights in diffusers' format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint's folder, or a run's output: its latest one.")],
    out: Annotated[Path, typer.Option(help="A folder that is not there yet.")],
) -> int:
    """Write a checkpoint's weights, and their average, in diffusers' format."""
    from bigdit.errors import UserError

    if out.exists():
        raise UserError(f"--out {out} is there already; name a folder that is not")

    from bigdit import libraries, log

    libraries.prepare()

    from bigdit.checkpoint import export, find_checkpoint, verify

    found, notices = find_checkpoint(checkpoint)
    for line in notices:
        log.notice(line)
    verify(found)
    export(found, out)
    log.notice(f"wrote {found.folder} to {out}")
    return 0
