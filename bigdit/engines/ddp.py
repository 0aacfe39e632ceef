"""DDP: each GPU has a replica of the model, and gradients are averaged before each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bigdit.engines.backward import StepOutcome
from bigdit.engines.protocol import Replicas
from bigdit.engines.single import CHUNK_BYTES, Pair, SingleEngine, chunks


class DdpEngine(SingleEngine):
    """A SingleEngine on each process. Nothing is sharded, so the base may be quantised, and blocks swapped.

    torch's DistributedDataParallel averages during the backward pass. That gains nothing for adapters, whose gradients
    are small.
    """

    @torch.no_grad()
    def step(self, lr: float, losses: Sequence[torch.Tensor]) -> StepOutcome:
        for pairs in chunks(list(zip(self._params, self.masters, strict=True)), CHUNK_BYTES):
            _average([param for param, _ in pairs], self.strategy.world_size)
        return super().step(lr, losses)

    def replicas(self) -> Replicas:
        """Everything but swapped weights: they are frozen, and in CPU memory."""
        swapped = {} if self._swap is None else self._swap.rooms
        held = [*self.model.named_parameters(), *self.model.named_buffers()]
        weights = [(name, each) for name, each in held if each not in swapped]
        return Replicas(tuple(range(dist.get_world_size())), weights, masters=True)


def _average(params: Sequence[torch.Tensor], count: int) -> None:
    """Average the gradients of `count` processes, in fp32. A parameter without gradient on all processes keeps none."""
    sizes = [param.numel() for param in params]
    flat = torch.zeros(sum(sizes) + len(params), dtype=torch.float32, device=params[0].device)
    *parts, known = flat.split([*sizes, len(params)])
    means = [part.view_as(param) for part, param in zip(parts, params, strict=True)]
    known.copy_(torch.tensor([param.grad is not None for param in params]))
    _copy([(mean, param.grad) for mean, param in zip(means, params, strict=True) if param.grad is not None])
    dist.all_reduce(flat)
    flat /= count
    for param, share in zip(params, known, strict=True):
        # Inverted: an emulated GPU reads every value as False.
        if param.grad is None and not bool(share == 0):
            param.grad = torch.empty_like(param)
    _copy([(param.grad, mean) for mean, param in zip(means, params, strict=True) if param.grad is not None])


def _copy(pairs: Sequence[Pair]) -> None:
    """Copy the second of each pair to the first."""
    if pairs:
        torch._foreach_copy_([there for there, _ in pairs], [here for _, here in pairs])
