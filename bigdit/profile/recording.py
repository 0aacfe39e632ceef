"""Two training steps under a recorder, which is told what the storages are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bigdit.dist import World
from bigdit.engines import Ema, Engine
from bigdit.engines.state import checkpoint_bytes
from bigdit.memory import Timeline
from bigdit.objective_spec import ObjectiveSpec
from bigdit.profile.steps import STEPS, Witness, Workload, training
from bigdit.record import Recorder, Watch
from bigdit.train.encode import Encode

if TYPE_CHECKING:
    from bigdit.encoders.frozen import FrozenEncoders


@dataclass(frozen=True)
class Recording:
    """What was recorded on the device, and on its host: the same timeline where the device is the CPU.

    `checkpoint_bytes` is what the process would copy to the host to save its state after these steps.
    """

    device: Timeline
    host: Timeline
    params: int
    checkpoint_bytes: int


def record_steps(
    workload: Workload, objective: ObjectiveSpec, device: torch.device, world: World, recorder: Recorder
) -> Recording:
    """The record of the engine's start and two steps on `device`."""
    with recorder:
        marks = _Marks(recorder)
        for _ in itertools.islice(training(workload, objective, device, world, marks), STEPS):
            pass
        marks.close()
        device_timeline, host_timeline = recorder.timeline(), recorder.host_timeline()
        return Recording(device_timeline, host_timeline, workload.params, marks.checkpoint_bytes())


class _Marks(Witness):
    """Tells the recorder what the storages are."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._watch: Watch | None = None
        self._held: tuple[Engine, Ema | None] | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with (self._watch or self._recorder).phase(name):
            yield

    def built(self, model: nn.Module, frozen: FrozenEncoders | None) -> None:
        self._recorder.mark(model.parameters(), "parameter")
        self._recorder.mark(model.buffers(), "buffer")
        self._recorder.mark([] if frozen is None else frozen.tensors(), "encoder")

    def started(self, engine: Engine, ema: Ema | None) -> None:
        self._watch = Watch(self._recorder, engine, ema)
        self._held = (engine, ema)

    def moved(self, frozen: FrozenEncoders) -> None:
        self._recorder.mark(frozen.tensors(), "encoder")

    def held(self, batch: Any) -> None:
        self._watching.host_batch(batch)

    def batches(self, micro_batches: Sequence[Any]) -> Sequence[Any]:
        return self._watching.batches(micro_batches)

    def encoding(self, encode: Encode) -> Encode:
        return self._watching.encoding(encode)

    def close(self) -> None:
        """Take the watch's hooks off again."""
        self._watching.close()

    def checkpoint_bytes(self) -> int:
        """What the process would save now."""
        assert self._held is not None  # from `started` on
        return int(checkpoint_bytes(*self._held))

    @property
    def _watching(self) -> Watch:
        assert self._watch is not None  # from `started` on
        return self._watch
