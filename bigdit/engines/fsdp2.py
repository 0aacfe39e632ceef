"""FSDP2: fully sharded data parallelism on DTensors (torch.distributed.fsdp.fully_shard)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bigdit import optim
from bigdit.dist import World
from bigdit.engines.protocol import compute_dtype
from bigdit.models import Family
from bigdit.spec import Strategy


class Fsdp2Engine:
    """Each block a unit, the rest of the model one more; fp32 shards are the masters, gathered in bf16."""

    model: FSDPModule

    def __init__(
        self, strategy: Strategy, model: nn.Module, family: Family, *, device: torch.device, world: World
    ) -> None:
        self.strategy = strategy
        self.device = device
        mesh = device_mesh.init_device_mesh(device.type, (world.world_size,))
        dtype = compute_dtype(strategy)
        # Inputs are cast by the step: FSDP2's own cast would round t, which the embedding needs in fp32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        model.float()  # from values already rounded to the compute dtype, where every engine starts
        for unit in (*family.blocks(model), model):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=strategy.reshard_after_forward)
        self.model = model
        self.masters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optim.build(strategy.optimizer, self.masters)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)
        (loss / self.strategy.grad_accum_steps).backward()

    def step(self, lr: float) -> torch.Tensor | None:
        norm = None
        if self.strategy.gradient_clipping is not None:
            norm = nn.utils.clip_grad_norm_(self.masters, self.strategy.gradient_clipping)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optim.set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self.model.named_parameters():
            yield name, param.detach().full_tensor().float().cpu()
