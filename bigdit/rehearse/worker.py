"""Rehearsals in this process, a fork of `python -m bigdit.rehearse`."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from bigdit import models
from bigdit.dist import World
from bigdit.errors import versions
from bigdit.memory import CUDA_GRANULARITY, ledger
from bigdit.rehearse.device import fake_device
from bigdit.rehearse.drive import record
from bigdit.rehearse.encoding import record_encoding
from bigdit.rehearse.engines.group import fake_group
from bigdit.rehearse.notices import notices
from bigdit.rehearse.request import Kernels, Rehearsal, RehearsalRequest, RehearsedSize
from bigdit.spec import Strategy

_MOST_GARBAGE = 300_000
"""Objects, of some 80 MB, that rehearsals leave before garbage is looked for among them: that takes as long as one. A
deep model's by FSDP2 leaves 37,000 (torch 2.13), by one process ten."""

_COUNTED_EVERY = 8
"""Rehearsals between two counts of all objects, of which each takes 0.1 s."""

_settled: int | None = None
"""Objects when garbage was last looked for."""

_rehearsed = 0


def import_for(question: str) -> None:
    """Import the model that the question is about, and what its step needs that takes long, once for all processes that
    begin there."""
    import diffusers
    import torch

    from bigdit import optim

    request = RehearsalRequest.model_validate_json(question)
    getattr(diffusers, request.model.class_name, None)
    strategy = request.strategy
    # Of one number: it imports the library that has the optimizer.
    optim.build(strategy.optimizer, [torch.zeros(1)], stochastic_rounding=strategy.precision == "bf16_sr")
    if strategy.engine == "deepspeed":
        os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed looks for one, and warns
        import bigdit.rehearse.engines.deepspeed
    if strategy.engine == "fsdp2":
        import bigdit.engines.fsdp2
        import bigdit.rehearse.engines.fsdp2
    if request.encoders is not None:
        import bigdit.encoders.frozen  # noqa: F401


def answer(question: str) -> tuple[str, bool]:
    """Rehearse each micro-batch size of the request in this process, which may go on; of one without any, make the
    model of shapes alone."""
    request = RehearsalRequest.model_validate_json(question)
    if not request.micro_batch_sizes:
        models.outline(request.model)
    sizes = tuple(rehearse_size(request, size) for size in request.micro_batch_sizes)
    _collect_much_garbage()
    return Rehearsal(sizes=sizes).model_dump_json(), True


def _collect_much_garbage() -> None:
    global _settled, _rehearsed
    _rehearsed += 1
    if _rehearsed % _COUNTED_EVERY:
        return
    count = gc.get_freeze_count()  # of the time when the last recording began
    if _settled is None:
        _settled = count
    if count - _settled > _MOST_GARBAGE:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _settled = gc.get_freeze_count()


def rehearse_size(request: RehearsalRequest, micro_batch_size: int) -> RehearsedSize:
    """The rehearsal of one micro-batch size, in this process."""
    began = time.perf_counter()
    if request.encoders is not None:
        from bigdit.encoders.frozen import look_into_fake_masks  # transformers takes seconds to import

        look_into_fake_masks()
    strategy = request.strategy.with_micro_batch_size(micro_batch_size)
    if strategy.optimizer.name == "paged_adamw_8bit" and request.kernels == "cuda":
        from bigdit.rehearse.engines.paged import page_on_the_host

        page_on_the_host()
    card = fake_device(request.kernels, request.compute_capability, request.device_bytes, request.multiprocessors)
    with _world(strategy, request.kernels) as world, card as device:
        if request.part == "encoders":
            assert request.encoders is not None
            recording = record_encoding(request.encoders, request.batch, strategy, device)
        else:
            objective, encoders = request.objective, request.encoders
            recording = record(request.model, request.batch, strategy, objective, device, world, encoders)
    found = versions()
    return RehearsedSize(
        micro_batch_size=micro_batch_size,
        params=recording.params,
        ledger=ledger(recording.device, CUDA_GRANULARITY if request.kernels == "cuda" else 1),
        packed_timeline=recording.device.pack(),
        packed_host_timeline=recording.host.pack() if request.kernels == "cuda" else None,
        checkpoint_bytes=recording.checkpoint_bytes,
        versions=found,
        notices=notices(strategy, found),
        seconds=round(time.perf_counter() - began, 3),
    )


@contextmanager
def _world(strategy: Strategy, kernels: Kernels) -> Iterator[World]:
    """This process among as many as the strategy has, of which none is there."""
    if strategy.engine == "single":
        yield World()
        return
    peers: AbstractContextManager[None] = nullcontext()
    if strategy.engine == "deepspeed":
        os.environ["DS_ACCELERATOR"] = "cpu"  # where a fork began with another engine
        from bigdit.rehearse.engines.deepspeed import alone

        peers = alone(kernels, strategy.world_size)
    if strategy.engine == "fsdp2":
        from bigdit.rehearse.engines.fsdp2 import do_without_data

        do_without_data()
    with peers, fake_group(strategy.world_size, kernels) as world:
        yield world
