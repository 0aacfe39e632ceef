"""The real step as torch's profiler sees it."""

from __future__ import annotations

import gc

import torch
from tiny_models import SHAPE, THREE_BLOCKS
from stepping import equipped
from torch.profiler import ProfilerActivity, profile

from bigdit import engines
from bigdit.dist import World
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.data import batch, feed
from bigdit.rehearse.drive import STEPS
from bigdit.spec import Strategy
from bigdit.train.step import train_step


def profiled_step(strategy: Strategy) -> tuple[list[tuple[int, int]], list[int]]:
    """The allocator's own report of two steps without a recorder: (time, bytes), and where phases start."""
    family, model = equipped(strategy, THREE_BLOCKS)
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine = engines.create(strategy, model, family, device=torch.device("cpu"), world=World())
            ahead = feed(lambda: batch(SHAPE, strategy), strategy, pin=False)
            for _ in range(STEPS):
                micro_batches = next(ahead)
                train_step(engine, family, FlowMatchingSpec(), micro_batches, lr=1e-4)
                del micro_batches
    finally:
        gc.enable()
    events = profiled.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return changes, sorted(event.start_ns() for event in events if event.name() in ("forward", "step"))
