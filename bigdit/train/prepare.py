"""From a run's config to what the loop needs, with every check that needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bigdit.catalog.families import training_obstacle
from bigdit.catalog.resolve import model_spec
from bigdit.config import RunConfig, check, strategy_of
from bigdit.errors import UserError
from bigdit.spec import ModelSpec, Strategy


def prepare(run: RunConfig, world_size: int) -> tuple[ModelSpec, Strategy]:
    """The model and the strategy of `run` on `world_size` processes. Raises UserError with all problems."""
    spec = model_spec(run.model)
    obstacle = training_obstacle(spec.class_name)
    if obstacle is not None:
        raise UserError(f"model {spec.name} cannot be trained: {obstacle}; `bigdit models` lists those that can")
    check(run, spec)
    return spec, strategy_of(run, world_size)


def with_ds_config(overrides: Sequence[str], ds_config: Path | None) -> list[str]:
    """`--ds-config FILE` as the overrides that it stands for."""
    if ds_config is None:
        return list(overrides)
    return ["engine.name=deepspeed", f"engine.ds_config={ds_config}", *overrides]
