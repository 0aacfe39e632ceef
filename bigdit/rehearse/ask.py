"""From a catalogue model, a card and a strategy to a rehearsal's question. Nothing here imports torch."""

from __future__ import annotations

import re

from bigdit.catalog import CatalogModel, Gpu, batch_shape
from bigdit.catalog.encoders import online_encoders
from bigdit.errors import UserError
from bigdit.rehearse.request import RehearsalRequest
from bigdit.spec import Strategy


def request_for(
    model: CatalogModel,
    gpu: Gpu,
    strategy: Strategy,
    *,
    resolution: int | tuple[int, int] | None = None,
    frames: int | None = None,
) -> RehearsalRequest:
    """One strategy of `model` on `gpu`, at `resolution` (a side, or height and width) and `frames` of a video.

    What is left out is the model's own. Raises UserError for a model that cannot be rehearsed, pixels that do not
    fit it, and a precision that the card does not compute.
    """
    if model.obstacle is not None:
        raise UserError(f"{model.name} cannot be rehearsed: {model.obstacle}; `bigdit models` lists those that can")
    if strategy.precision in ("bf16", "bf16_sr") and gpu.tflops.bf16 is None:
        capability = ".".join(str(part) for part in gpu.compute_capability)
        raise UserError(
            f"{gpu.title} computes no bf16 (compute capability {capability}), and precision is {strategy.precision}; "
            "fp16 and fp32 fit it"
        )
    batch = batch_shape(model, resolution, frames)
    return RehearsalRequest(
        model=model.spec,
        batch=batch,
        strategy=strategy,
        micro_batch_sizes=(strategy.micro_batch_size,),
        encoders=online_encoders(model, batch) if strategy.features == "online" else None,
        compute_capability=gpu.compute_capability,
    )


def parse_resolution(text: str | None) -> int | tuple[int, int] | None:
    """`1024` or `480x832` (height × width). Raises UserError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:[x×](\d+))?", text.strip())
    if match is None or not int(match[1]):
        raise UserError(f"--resolution expects pixels such as 1024 or 480x832 (height x width), and {text!r} was found")
    return (int(match[1]), int(match[2])) if match[2] else int(match[1])
