"""What the training step, the checkpoint and the recorder need from an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from bigdit import optim
from bigdit.engines.backward import LossScaler, Stepped
from bigdit.strategy import Strategy


class Engine(Protocol):
    """Owns the weights and the optimizer. `backward` for every micro-batch, then one `step`.

    `masters`: the tensors that the optimizer updates on this process: fp32 (bf16_sr: bf16), flat or sharded as the
    engine keeps them; `optimizer.state` is keyed by them. With optimizer_in_backward the optimizer uses the lr that was
    set before `backward`. `scaler`: of the fp16 loss, where the engine scales it itself. Methods with a body here suit
    an engine that adds nothing to torch.
    """

    strategy: Strategy
    device: torch.device
    model: nn.Module
    masters: list[torch.Tensor]
    optimizer: Optimizer
    scaler: LossScaler | None

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add this micro-batch's share of the mean gradient; `last` marks the step's last micro-batch."""
        ...

    def step(self, lr: float, losses: Sequence[torch.Tensor]) -> Stepped:
        """Clip, update, clear gradients; or only clear them, where they are not finite on any process.

        `losses`: of this process's micro-batches; they decide where the engine knows no norm of the gradients.
        """
        ...

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surround forward passes without a backward pass: all processes, as many each. Schedule-free's weights are
        their average."""
        self.model.eval()
        try:
            with optim.averaged(self.optimizer) as changed, torch.no_grad():
                if changed:
                    self.publish()
                yield
        finally:
            self.model.train()
        if changed:
            self.publish()

    def publish(self) -> None:
        """Copy the masters to the weights, where these are apart and others wrote to the masters; on all processes."""
        return

    @contextmanager
    def on_device(self, master: torch.Tensor) -> Iterator[None]:
        """Surround a step of this master alone that only makes its state. One in CPU memory is on the device, with any
        values."""
        yield

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in fp16; else 1."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def buffers(self) -> Iterable[torch.Tensor]:
        """What the engine holds now besides parameters, masters, gradients and state, such as its buckets."""
        return ()

    def gradients(self) -> Iterable[torch.Tensor]:
        """Gradients that the engine holds now besides those of parameters and masters."""
        return ()

    def calls(self) -> Iterable[tuple[object, str]]:
        """Methods, by object and name, in which the engine allocates for itself."""
        return ()

    def shards(self) -> list[Shard]:
        """What this process's masters hold of the trained parameters, by their names in the plain model."""
        ...

    def replicas(self) -> Replicas | None:
        """What other processes hold alike; None where each holds its own part."""
        return None


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


def use_matmul_precision(strategy: Strategy) -> None:
    """Let fp32 matrix products and convolutions on CUDA use TF32 only where the strategy says so.

    TF32 keeps 10 bits of the mantissa; torch's own default is TF32 for cuDNN's convolutions alone.
    """
    precision = "tf32" if strategy.precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision


@dataclass(frozen=True)
class Shard:
    """A run of a parameter's consecutive elements, within a master of this process.

    Elements `offset` to `offset + length` of the parameter `name`, of whole `shape`, are elements `start` to `start +
    length` of master number `master`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    master: int
    start: int
    length: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Replicas:
    """What processes of these `ranks` hold alike, this one among them: `weights`, and with `masters` also masters,
    optimizer state and EMA."""

    ranks: tuple[int, ...]
    weights: Iterable[tuple[str, torch.Tensor]]
    masters: bool


def whole(named: Iterable[tuple[str, torch.Tensor]]) -> list[Shard]:
    """Parameters that are each their own master, in the masters' order."""
    return [Shard(name, tuple(param.shape), 0, i, 0, param.numel()) for i, (name, param) in enumerate(named)]
