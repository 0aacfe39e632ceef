"""What the training step, the checkpoint and the rehearsal ask of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from bigdit.spec import Strategy


class Engine(Protocol):
    """Owns the weights and the optimizer. `backward` of every micro-batch, then one `step`.

    `masters` are the tensors that the optimizer updates on this process: fp32, flat or sharded as the engine
    keeps them; `optimizer.state` is keyed by them.
    """

    strategy: Strategy
    device: torch.device
    model: nn.Module
    masters: list[torch.Tensor]
    optimizer: Optimizer

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add this micro-batch's share of the mean gradient; `last` marks the step's last micro-batch."""
        ...

    def step(self, lr: float) -> torch.Tensor | None:
        """Clip, update, clear gradients. The gradient norm before clipping, where the strategy clips."""
        ...

    def buffers(self) -> Iterable[torch.Tensor]:
        """What the engine holds now beyond parameters, masters, gradients and state, such as its buckets."""
        ...

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter by its name in the plain model, whole, fp32, on the host. All processes iterate it."""
        ...


_COMPUTE_DTYPE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16_sr": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_dtype(strategy: Strategy) -> torch.dtype:
    """The dtype of weights and activations in forward and backward."""
    return _COMPUTE_DTYPE[strategy.precision]
