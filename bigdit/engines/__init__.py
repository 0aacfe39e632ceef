"""Engines with one protocol: single, DDP, DeepSpeed ZeRO 0-3, FSDP2. They own weights, optimizers and the EMA.

The step is in `train/step.py`, saving in `checkpoint`.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bigdit.engines.ema import Ema, ema_of
from bigdit.engines.protocol import Engine, compute_dtype, use_matmul_precision
from bigdit.models import Family, split_context
from bigdit.models.float8 import check_gpu
from bigdit.strategy import Strategy


def check(strategy: Strategy) -> None:
    """Raise UserError if the engine's library rejects the strategy."""
    if strategy.engine == "deepspeed":
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed guesses, and warns on stdout
        from bigdit.engines.deepspeed import check_document

        check_document(strategy)


def create(strategy: Strategy, model: nn.Module, family: Family, *, device: torch.device) -> Engine:
    """The strategy's engine, which moves the model to the device. The model has the compute dtype, on any device.

    With several processes the process group must exist. Only the chosen engine is imported: DeepSpeed takes seconds.
    """
    use_matmul_precision(strategy)
    check_gpu(strategy, device)
    if strategy.cp > 1:
        split_context(model, family, _neighbours(strategy, device))
    if strategy.engine == "deepspeed":
        from bigdit.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(strategy, model, device=device)
    if strategy.engine == "fsdp2":
        from bigdit.engines.fsdp2 import Fsdp2Engine

        return Fsdp2Engine(strategy, model, family, device=device)
    if strategy.engine == "ddp":
        from bigdit.engines.ddp import DdpEngine

        return DdpEngine(strategy, model, family, device=device)
    from bigdit.engines.single import SingleEngine

    return SingleEngine(strategy, model, family, device=device)


def _neighbours(strategy: Strategy, device: torch.device) -> DeviceMesh:
    """The processes that share this process's samples: by ring attention, Ulysses, or a ring of Ulysses groups."""
    ring, ulysses = strategy.cp_ring, strategy.cp // strategy.cp_ring
    several = {name: size for name, size in (("dp", strategy.dp), ("ring", ring), ("ulysses", ulysses)) if size > 1}
    mesh = init_device_mesh(device.type, tuple(several.values()), mesh_dim_names=tuple(several))
    return mesh[tuple(name for name in several if name != "dp")]
