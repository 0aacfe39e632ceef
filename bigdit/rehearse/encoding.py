"""The encoders alone under a recorder: those of pictures, then those of texts, as where they take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from bigdit.catalog.encoders import OnlineEncoders
from bigdit.record import Recorder
from bigdit.rehearse.data import raw_batch
from bigdit.rehearse.drive import Recording
from bigdit.rehearse.kernels.mended import known_answers
from bigdit.rehearse.kernels.reads import named_in_errors
from bigdit.rehearse.request import PICTURES, TEXTS
from bigdit.rehearse.scratch import scratch_of
from bigdit.spec import BatchShape, Strategy

if TYPE_CHECKING:
    from bigdit.encoders.frozen import FrozenEncoders
    from bigdit.loader.raw import RawBatch


def record_encoding(encoders: OnlineEncoders, shape: BatchShape, strategy: Strategy, device: torch.device) -> Recording:
    """The record of one micro-batch through the encoders, without a model beside them, in phases PICTURES and TEXTS."""
    from bigdit.encoders.frozen import FrozenEncoders  # transformers takes seconds to import

    frozen = FrozenEncoders(encoders)
    raw = raw_batch(encoders, shape, strategy)
    recorder = Recorder(device.type, scratch_of(device), known_answers())
    with recorder, named_in_errors(encoders.vae.class_name, recorder):
        for phase, modules, encode in _sides(frozen, raw, device):
            with recorder.phase("init"):
                for module in modules:
                    recorder.mark(module.to(device).parameters(), "encoder")
            with recorder.phase(phase):
                encode()
            with recorder.phase("init"):
                for module in modules:
                    module.to("cpu")
        params = sum(tensor.numel() for module in frozen.modules() for tensor in module.parameters())
        return Recording(recorder.timeline(), recorder.host_timeline(), params, checkpoint_bytes=0)


def _sides(
    frozen: FrozenEncoders, raw: RawBatch, device: torch.device
) -> tuple[tuple[str, list[nn.Module], Callable[[], object]], ...]:
    """Of each phase the modules, and what they are asked."""

    def pictures() -> object:
        return frozen.latents(raw.pixels.to(device))

    def texts() -> object:
        return frozen.texts([(ids.to(device), mask.to(device)) for ids, mask in raw.tokens])

    return (PICTURES, frozen.of_pictures(), pictures), (TEXTS, frozen.of_texts(), texts)
