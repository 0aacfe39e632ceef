"""`bigdit export`: a checkpoint's weights in diffusers' format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bigdit import log
from bigdit.commands import EmaWidth
from bigdit.errors import UserError
from bigdit.files import alone, check_writable, writing_for

if TYPE_CHECKING:
    from bigdit.checkpoint import Checkpoint
    from bigdit.checkpoint.single_file import Kind


def run(
    checkpoint: Annotated[
        Path, typer.Option(metavar="DIR", help="A checkpoint, or the output of a run: its latest checkpoint.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")],
    ema_width: EmaWidth = None,
    single_file: Annotated[
        Literal["bf16", "fp8", "fp8_scaled"] | None,
        typer.Option(
            help="Also write the model as one file with the names that ComfyUI reads. fp8: weights of the blocks' "
            "linear layers in e4m3; fp8_scaled: with a scale for each."
        ),
    ] = None,
) -> int:
    """Write a checkpoint's weights and their EMA in diffusers' format.

    For a LoRA run it writes the adapters. If the run names a pipeline's folder, it writes a whole pipeline.
    """
    from bigdit import libraries

    if os.path.lexists(out):
        raise UserError(f"--out {out} exists already; name a new folder")
    check_writable("--out", out)
    libraries.prepare()

    from bigdit.checkpoint import find_checkpoint

    found, notices = find_checkpoint(checkpoint)
    for line in notices:
        log.notice(line)
    with writing_for("--out"), alone(out):
        _export(found, out, ema_width, single_file)
    log.notice(f"wrote {found.folder} to {out}")
    return 0


def _export(found: Checkpoint, out: Path, ema_width: float | None, single_file: Kind | None) -> None:
    from bigdit.checkpoint import PostHoc, export, pipeline_of, verify

    posthoc = None if ema_width is None else PostHoc(found, ema_width)
    if posthoc is None:
        verify(found)
    else:
        log.notice(posthoc.message)
    pipeline = pipeline_of(found)
    if isinstance(pipeline, str):
        export(found, out, posthoc, single_file=single_file, replace=False)
        kinds = {"lora": "the adapters are", "controlnet": "the ControlNet is"}
        strategy = found.state["strategy"]
        written = next((what for key, what in kinds.items() if strategy.get(key)), "the transformer is")
        log.notice(f"note: {written} written without a pipeline: {pipeline}")
    else:
        export(found, out, posthoc, pipeline, single_file=single_file, replace=False)
