"""From a catalogue model, a card and a strategy to a rehearsal's question. Nothing here imports torch."""

from __future__ import annotations

import re

from bigdit.catalog import CatalogModel, Gpu, batch_shape
from bigdit.catalog.encoders import online_encoders
from bigdit.errors import UserError
from bigdit.numbers import LARGEST_SIDE
from bigdit.rehearse.request import RehearsalRequest
from bigdit.spec import Precision, Strategy


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
    problems = [*model_problems(model), *precision_problems(gpu, strategy.precision)]
    if problems:
        raise UserError(*problems)
    batch = batch_shape(model, resolution, frames)
    return RehearsalRequest(
        model=model.spec,
        batch=batch,
        strategy=strategy,
        micro_batch_sizes=(strategy.micro_batch_size,),
        encoders=online_encoders(model, batch) if strategy.features == "online" else None,
        compute_capability=gpu.compute_capability,
        multiprocessors=gpu.multiprocessors,
        device_bytes=device_bytes(gpu, strategy),
    )


def device_bytes(gpu: Gpu, strategy: Strategy) -> int | None:
    """What the engine is told that the card has, where it asks: ZeRO-1 and 2 do, to choose where they flatten weights.

    None for all others, whose rehearsals are then those of every card of as many multiprocessors that computes as it.
    """
    return gpu.told_bytes if strategy.zero_stage in (1, 2) else None


def model_problems(model: CatalogModel) -> list[str]:
    """Why `model` cannot be rehearsed; none where it can."""
    if model.obstacle is None:
        return []
    return [f"{model.name} cannot be rehearsed: {model.obstacle}; `bigdit models` lists those that can"]


def precision_problems(gpu: Gpu, precision: Precision) -> list[str]:
    """Why `gpu` does not compute in `precision`; none where it does."""
    if precision not in ("bf16", "bf16_sr") or gpu.tflops.bf16 is not None:
        return []
    capability = ".".join(str(part) for part in gpu.compute_capability)
    return [
        f"{gpu.title} computes no bf16 (compute capability {capability}), and precision is {precision}; "
        "fp16 and fp32 fit it"
    ]


def parse_resolution(text: str, option: str = "--resolution") -> int | tuple[int, int]:
    """`1024` or `480x832` (height × width), as `option` was given. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d{1,20})(?:[x×](\d{1,20}))?", text.strip())
    sides = [] if match is None else [int(side) for side in match.groups() if side is not None]
    if match is None or not all(0 < side <= LARGEST_SIDE for side in sides):
        most = f", {LARGEST_SIDE} a side at most" if any(side > LARGEST_SIDE for side in sides) else ""
        raise UserError(
            f"{option} expects pixels such as 1024 or 480x832 (height x width){most}, and {text[:40]!r} was found"
        )
    return (int(match[1]), int(match[2])) if match[2] else int(match[1])
