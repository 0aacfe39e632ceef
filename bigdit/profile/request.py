"""What is asked of an emulated GPU: a model, a batch and a strategy. Nothing here imports torch."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from bigdit.catalog import FAMILIES, CatalogModel, Gpu, batch_shape
from bigdit.catalog.encoders import OnlineEncoders, online_encoders
from bigdit.catalog.families import family_objective
from bigdit.errors import UserError
from bigdit.numbers import LARGEST_SIDE
from bigdit.objective_spec import ObjectiveSpec
from bigdit.spec import BatchShape, ModelSpec, Precision, Strategy, Strict

PICTURES, TEXTS = "pictures", "texts"
"""The phases of encoders alone."""


def weights_of(phase: str) -> str:
    """The phase in which the weights of these encoders come to the GPU."""
    return f"weights of {phase}"


class StepRequest(Strict):
    """The training steps of one strategy, or a micro-batch through its encoders alone (`part`).

    `objective`: left out, the model's own. `encoders`: those that run in the step, with features online.
    """

    model: ModelSpec
    batch: BatchShape
    strategy: Strategy
    objective: ObjectiveSpec = Field(default_factory=lambda given: family_objective(given["model"]))
    encoders: OnlineEncoders | None = None
    part: Literal["steps", "encoders"] = "steps"


def request_for(
    model: CatalogModel,
    gpu: Gpu,
    strategy: Strategy,
    *,
    resolution: int | tuple[int, int] | None = None,
    frames: int | None = None,
) -> StepRequest:
    """One strategy of `model` on `gpu`, at `resolution` (a side, or height and width) and `frames` of a video.

    What is left out is the model's own. Raises UserError for a model that has no step yet, pixels that do not fit it,
    and a precision that the GPU does not compute.
    """
    problems = [*model_problems(model), *precision_problems(gpu, strategy.precision)]
    if problems:
        raise UserError(*problems)
    batch = batch_shape(model, resolution, frames)
    encoders = online_encoders(model, batch) if strategy.features == "online" else None
    return StepRequest(model=model.spec, batch=batch, strategy=strategy, encoders=encoders)


def check(request: StepRequest) -> None:
    """Raise UserError for a request that no step can answer."""
    inputs = FAMILIES.get(request.model.class_name)
    if inputs is not None and inputs.text_dim is not None and request.batch.text is None:
        raise UserError(f"a step of {request.model.name} needs the shape of the model's text, (tokens, dim)")
    online = request.strategy.features == "online"
    if online and request.encoders is None:
        raise UserError(
            f"strategy.features is online, and the request for {request.model.name} has no encoders; "
            "catalog.encoders.online_encoders has those of the catalogue's models"
        )
    if not online and request.encoders is not None:
        raise UserError("encoders were given, and strategy.features is cached, which needs none; set it to online")


def model_problems(model: CatalogModel) -> list[str]:
    """Why `model` has no training step yet; none where it has."""
    if model.obstacle is None:
        return []
    return [f"{model.name} cannot be planned: {model.obstacle}; `bigdit models` lists those that can"]


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
