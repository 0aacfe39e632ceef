"""The protocol of engines: what the training step, checkpoints and the recorder need."""

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
from bigdit.engines.backward import LossScaler, StepOutcome
from bigdit.strategy import Strategy


class Engine(Protocol):
    """Owns the weights and the optimizer. Call `backward` for every micro-batch, then `step` once.

    `masters`: the tensors that the optimizer updates on this process: fp32 (bf16_sr: bf16), in the engine's own layout;
    `optimizer.state` has them as keys. With optimizer_in_backward the lr must be set before `backward`. `scaler`: of
    the fp16 loss, None if the engine's library scales it. Methods with a body suit engines that add nothing to torch.
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

    def step(self, lr: float, losses: Sequence[torch.Tensor]) -> StepOutcome:
        """Clip, update and clear gradients; or only clear them, if any process's are not finite.

        `losses`: of this process's micro-batches; they decide if the engine computes no norm of the gradients.
        """
        ...

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surround forward passes without a backward pass; all processes make the same number. Schedule-free's weights
        are their average inside."""
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
        """Copy the masters to the weights, if they are separate, after masters were changed; on all processes."""
        return

    @contextmanager
    def on_device(self, master: torch.Tensor) -> Iterator[None]:
        """Surround a step of this master that only allocates its state. Inside, a swapped master is on the device,
        without its values."""
        yield

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in fp16; else 1."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def buffers(self) -> Iterable[torch.Tensor]:
        """Current tensors besides parameters, masters, gradients and state, such as buckets."""
        return ()

    def gradients(self) -> Iterable[torch.Tensor]:
        """Current gradients besides those of parameters and masters."""
        return ()

    def calls(self) -> Iterable[tuple[object, str]]:
        """(object, method) in which the engine allocates its own memory."""
        return ()

    def shards(self) -> list[Shard]:
        """Which elements of the trained parameters this process's masters hold, by names in the plain model."""
        ...

    def replicas(self) -> Replicas | None:
        """What other processes hold too; None if each holds its own part."""
        return None


def compute_dtype(strategy: Strategy) -> torch.dtype:
    """The dtype of weights and activations in forward and backward."""
    half = {"bf16": torch.bfloat16, "bf16_sr": torch.bfloat16, "fp16": torch.float16}
    return half.get(strategy.precision, torch.float32)


def use_matmul_precision(strategy: Strategy) -> None:
    """Let fp32 matrix products and convolutions on CUDA use TF32 only if the strategy says so.

    TF32 has 10 bits of mantissa. torch's default is TF32 for cuDNN's convolutions only.
    """
    precision = "tf32" if strategy.precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision


@dataclass(frozen=True)
class Shard:
    """Consecutive elements of a parameter that a master of this process holds.

    Elements `offset` to `offset + length` of the parameter `name`, whose whole shape is `shape`, are elements `start`
    to `start + length` of master number `master`.
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
    """Equal tensors on the processes of these `ranks`, one of them this process: `weights`, and with `masters` also
    masters, optimizer state and EMA."""

    ranks: tuple[int, ...]
    weights: Iterable[tuple[str, torch.Tensor]]
    masters: bool


def whole(named: Iterable[tuple[str, torch.Tensor]]) -> list[Shard]:
    """Shards for masters that hold one whole parameter each, in the masters' order."""
    return [Shard(name, tuple(param.shape), 0, i, 0, param.numel()) for i, (name, param) in enumerate(named)]
