"""Two real training steps under a recorder, on fake tensors or on real ones: the code is the same."""

from __future__ import annotations

import torch

from bigdit.catalog.encoders import OnlineEncoders
from bigdit.dist import World
from bigdit.memory import Timeline
from bigdit.objective_spec import ObjectiveSpec
from bigdit.record import Recorder
from bigdit.rehearse.data import batch
from bigdit.rehearse.kernels.mended import known_answers
from bigdit.rehearse.kernels.reads import named_in_errors
from bigdit.rehearse.recording import Recording, record_steps
from bigdit.rehearse.scratch import scratch_of
from bigdit.rehearse.steps import STEPS, prepare
from bigdit.spec import BatchShape, ModelSpec, Strategy

__all__ = ["STEPS", "Recording", "batch", "drive", "record"]


def drive(
    spec: ModelSpec,
    shape: BatchShape,
    strategy: Strategy,
    objective: ObjectiveSpec,
    device: torch.device,
    world: World,
) -> tuple[Timeline, int]:
    """The device's part of `record`, and the model's parameter count."""
    recording = record(spec, shape, strategy, objective, device, world)
    return recording.device, recording.params


def record(
    spec: ModelSpec,
    shape: BatchShape,
    strategy: Strategy,
    objective: ObjectiveSpec,
    device: torch.device,
    world: World,
    encoders: OnlineEncoders | None = None,
) -> Recording:
    """The record of the engine's start and two steps on `device`, with `encoders` where features are online."""
    workload = prepare(spec, shape, strategy, encoders)
    recorder = Recorder(device.type, scratch_of(device), known_answers())
    with named_in_errors(spec.name, recorder):
        return record_steps(workload, objective, device, world, recorder)
