"""`bigdit export`: a checkpoint's weights in diffusers' format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigdit.commands.options import EmaWidth

if TYPE_CHECKING:
    from bigdit.checkpoint import Checkpoint


def run(
    checkpoint: Annotated[
        Path, typer.Option(metavar="DIR", help="A checkpoint, or the output of a run: its latest checkpoint.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")],
    ema_width: EmaWidth = None,
) -> int:
    """Write a checkpoint's weights and their EMA in diffusers' format.

    Of a LoRA run it writes the adapters. If the run names a pipeline's folder, it writes a whole pipeline.
    """
    from bigdit import libraries, log
    from bigdit.errors import UserError
    from bigdit.files import alone, check_writable

    if os.path.lexists(out):
        raise UserError(f"--out {out} exists already; name a new folder")
    check_writable("--out", out)
    libraries.prepare()

    from bigdit.checkpoint import find_checkpoint

    found, notices = find_checkpoint(checkpoint)
    for line in notices:
        log.notice(line)
    with alone(out):
        _export(found, out, ema_width)
    log.notice(f"wrote {found.folder} to {out}")
    return 0


def _export(found: Checkpoint, out: Path, ema_width: float | None) -> None:
    from bigdit import log
    from bigdit.checkpoint import PostHoc, export, pipeline_of, verify

    posthoc = None if ema_width is None else PostHoc(found, ema_width)
    if posthoc is None:
        verify(found)
    else:
        log.notice(posthoc.message)
    pipeline = pipeline_of(found)
    if isinstance(pipeline, str):
        export(found, out, posthoc, replace=False)
        written = "the transformer is" if found.state["strategy"].get("lora") is None else "LoRA adapters are"
        log.notice(f"note: {written} written without a pipeline: {pipeline}")
    else:
        export(found, out, posthoc, pipeline, replace=False)
