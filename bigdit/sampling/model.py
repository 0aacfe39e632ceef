"""The model of a checkpoint as its run computed it: its precision, its base, its swapped blocks; forward alone."""

from __future__ import annotations

import torch
from torch import nn

from bigdit import models
from bigdit.checkpoint import Checkpoint, PostHoc, load_model, load_weights
from bigdit.config import RunConfig
from bigdit.engines import compute_dtype
from bigdit.models.swap import moved
from bigdit.spec import ModelSpec, Strategy

_FORWARD = {"checkpointed_blocks": 0, "offload_activations": False, "compile_blocks": False}
"""What of a strategy is of no use, or of too little, where nothing is trained."""


def model_of(
    checkpoint: Checkpoint, run: RunConfig, spec: ModelSpec, device: torch.device, *, ema: bool, posthoc: PostHoc | None
) -> nn.Module:
    """The model on `device`, of the weights, with `ema` of their average, or of that one. The checkpoint was verified.

    Raises UserError where weights cannot be read.
    """
    strategy = Strategy.model_validate(checkpoint.state["strategy"])
    family, dtype = models.family(spec.class_name), compute_dtype(strategy)
    swapped = strategy.blocks_to_swap if device.type == "cuda" else 0  # on a host it would save nothing
    if strategy.lora is None or run.model.init_from is None:
        model = models.skeleton(spec, dtype=dtype)
    else:
        model = load_model(spec, run.model.init_from, dtype=dtype)
    model = models.equip(model, family, strategy.model_copy(update=_FORWARD | {"blocks_to_swap": swapped}))
    if posthoc is None:
        load_weights(checkpoint, model, average=ema)
    else:
        posthoc.load(model)
    return moved(model, device).eval()
