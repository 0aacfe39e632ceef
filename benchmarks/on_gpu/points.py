"""The matrix's training steps for one H100: model, strategy, depth and allocator, most important first.

Each point was written down before it was measured. A micro-batch of one more than the largest should run out of
memory.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from bigdit import catalog
from bigdit.catalog import FAMILIES, CatalogModel, Gpu
from bigdit.config.strategy_text import parse_strategy
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.attempt import StepRequest, request_for

GPU = "h100-sxm"

MEASURED_BY = FlowMatchingSpec()
"""The objective of all measured runs. Some models have another one now."""


@dataclass(frozen=True)
class Point:
    """A strategy on one GPU for a model with at most `blocks` of each list of blocks (0: the whole model).
    `held_out`: measured last; no rule and no constant is made from it."""

    model: str
    strategy: str
    blocks: int = 0
    expandable_segments: bool = True
    held_out: bool = False

    @property
    def name(self) -> str:
        depth = f"{self.blocks} blocks" if self.blocks else "whole"
        return f"{self.model} ({depth}) · {self.strategy}{'' if self.expandable_segments else ' · default allocator'}"

    @property
    def key(self) -> str:
        """Its file name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")

    def asked(self) -> tuple[StepRequest, Gpu]:
        """The two steps, with the objective of the measured run, and the GPU. Its encoders took a whole micro-batch.
        Raises UserError for what the catalogue does not know."""
        gpu, model = catalog.resolve_gpu(GPU), catalog.find_model(self.model)
        if self.blocks:
            model = few_blocks(model, self.blocks)
        strategy = parse_strategy([self.strategy]).model_copy(update={"encode_chunk": None})
        request = request_for(model, gpu, strategy)
        return request.model_copy(update={"objective": MEASURED_BY}), gpu


def few_blocks(model: CatalogModel, most: int) -> CatalogModel:
    """`model` with at most this many blocks of each list."""
    inputs = FAMILIES[model.spec.class_name]
    most += most % 2 if inputs.even else 0
    kwargs, lists = dict(model.spec.kwargs), []
    for name, length in model.block_lists:
        kept = length
        if name in inputs.depths:
            kept = kwargs[inputs.depths[name]] = min(length, most)
        lists.append((name, kept))
    if "dual_attention_layers" in kwargs:  # of SD3.5-Medium: those that it keeps
        kwargs["dual_attention_layers"] = [block for block in kwargs["dual_attention_layers"] if block < most]
    if "llama_layers" in kwargs:  # of HiDream: the layer of Llama that each block reads
        kwargs["llama_layers"] = kwargs["llama_layers"][: sum(kept for _, kept in lists)]
    spec = model.spec.model_copy(update={"kwargs": kwargs})
    return model.model_copy(update={"spec": spec, "params": None, "block_lists": tuple(lists)})


POINTS = tuple(Point(**each) for each in json.loads(Path(__file__).with_suffix(".json").read_text()))
"""Compiled blocks and FP8. Whole models alternate with two blocks of each kind of kernel and optimizer, so that an
interrupted run has both. Engines and held-out points come last."""
