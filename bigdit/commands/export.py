"""`bigdit export`: a checkpoint's weights in diffusers' format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigdit.commands.options import EmaWidth


def run(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint's folder, or a run's output: its latest one.")],
    out: Annotated[Path, typer.Option(help="A folder that is not there yet.")],
    ema_width: EmaWidth = None,
) -> int:
    """Write a checkpoint's weights, and their average, in diffusers' format; with the pipeline that the run was fed by,
    where it has one."""
    from bigdit.errors import UserError

    if out.exists():
        raise UserError(f"--out {out} is there already; name a folder that is not")

    from bigdit import libraries, log

    libraries.prepare()

    from bigdit.checkpoint import PostHoc, export, find_checkpoint, pipeline_of, verify

    found, notices = find_checkpoint(checkpoint)
    for line in notices:
        log.notice(line)
    posthoc = None if ema_width is None else PostHoc(found, ema_width)
    if posthoc is None:
        verify(found)
    else:
        log.notice(posthoc.said)
    pipeline = pipeline_of(found)
    if isinstance(pipeline, str):
        export(found, out, posthoc)
        log.notice(f"note: the transformer alone is written, and no pipeline: {pipeline}")
    else:
        export(found, out, posthoc, pipeline)
    log.notice(f"wrote {found.folder} to {out}")
    return 0
