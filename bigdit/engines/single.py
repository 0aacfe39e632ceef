"""A single process, or one of several replicas: plain PyTorch, with fp32 masters of bf16 or fp16 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

from bigdit import optim
from bigdit.engines.backward import Backward, StepOutcome
from bigdit.engines.protocol import Engine, Shard, whole
from bigdit.models import Family
from bigdit.models.lora_files import TEXT_ENCODERS
from bigdit.models.swap import moved, swap_of, with_data
from bigdit.strategy import PACKAGES, Strategy
from bigdit.units import MIB, in_groups

# The most fp32 gradients at once. All together would take 4 bytes a parameter, and be the peak.
CHUNK_BYTES = 256 * MIB
# Adapters' gradients are many and small: so many bytes of them are converted together. Others are converted one by one,
# because gradients stay allocated while their fp32 copies are made, and the step may be the peak phase. With compiled
# blocks half a chunk is converted together, in a fifth of the launches: its peak is that of a chunk one by one.
LIST_BYTES = 2 * MIB
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A parameter and its master."""


class SingleEngine(Engine):
    """With bf16 and fp16 there are fp32 masters, and gradients are converted to fp32 chunk by chunk.

    In the other precisions the parameters are their own masters. fp16 scales the loss dynamically.
    """

    def __init__(self, strategy: Strategy, model: nn.Module, family: Family, *, device: torch.device) -> None:
        self.strategy = strategy
        self.device = device
        self._swap = swap_of(model)
        self.model = moved(model, device)
        self._named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._params = [p for _, p in self._named]
        self._mixed = strategy.precision in ("bf16", "fp16")
        self.masters = [p.detach().float() for p in self._params] if self._mixed else list(self._params)
        self.optimizer = optim.build(
            strategy.optimizer,
            optim.groups(
                strategy.optimizer,
                self.model,
                self.masters,
                blocks=family.blocks(self.model),
                slower=getattr(self.model, TEXT_ENCODERS, None),
                lr_factor=strategy.text_lr_factor,
            ),
            stochastic_rounding=strategy.precision == "bf16_sr",
        )
        self._backward = Backward(strategy, together=strategy.world_size > 1)
        self.scaler = self._backward.scaler
        if strategy.optimizer_in_backward:
            optim.step_in_backward(self.optimizer, self._params, self.masters, taken=lambda: self._backward.taken)
            if self._swap is not None:
                self._swap.step_in_backward(self.optimizer, taken=lambda: self._backward.taken)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._backward.run(loss)

    @torch.no_grad()
    def step(self, lr: float, losses: Sequence[torch.Tensor]) -> StepOutcome:
        if self.strategy.optimizer_in_backward:
            if self._swap is not None:
                self._swap.settle()
            return StepOutcome(self._backward.taken)
        optim.set_lr(self.optimizer, lr)
        stepped = self._step_masters(losses) if self._mixed else self._step_params(losses)
        self.optimizer.zero_grad(set_to_none=True)
        return stepped

    @torch.no_grad()
    def publish(self) -> None:
        if self._mixed:
            torch._foreach_copy_(self._params, self.masters)
        if self._swap is not None:
            self._swap.forget()

    @contextmanager
    def on_device(self, master: torch.Tensor) -> Iterator[None]:
        if self._swap is None or master not in self._swap.rooms:
            yield
        else:
            with with_data(master, torch.empty_like(master, device=self.device)):
                yield

    def shards(self) -> list[Shard]:
        return whole(self._named)

    def _step_params(self, losses: Sequence[torch.Tensor]) -> StepOutcome:
        stepped, factor = self._backward.decide(losses, lambda: nn.utils.get_total_norm(self._gradients()))
        if stepped.taken and factor is not None:
            torch._foreach_mul_(self._gradients(), factor)
        if stepped.taken:
            self.optimizer.step()
        return stepped

    def _step_masters(self, losses: Sequence[torch.Tensor]) -> StepOutcome:
        """Step the masters a chunk at a time. The optimizer skips those without gradient; some optimizers need all
        gradients at once."""
        stepped, factor = self._backward.decide(losses, lambda: _norm(self._gradients()))
        if not stepped.taken:
            self.model.zero_grad(set_to_none=True)
            return stepped
        most, at_once = CHUNK_BYTES, LIST_BYTES if self.strategy.lora is not None else 0
        if self.strategy.compile_blocks:
            most = at_once = CHUNK_BYTES // 2
        pairs = list(zip(self._params, self.masters, strict=True))
        for chunk in [pairs] if self.strategy.optimizer.name in PACKAGES else chunks(pairs, most):
            for some in chunks([pair for pair in chunk if pair[0].grad is not None], at_once):
                _widen(some)
            params, masters = zip(*chunk, strict=True)
            gradients = [master.grad for master in masters if master.grad is not None]
            if factor is not None and gradients:
                torch._foreach_mul_(gradients, factor)
            del gradients  # else they stay allocated while the next chunk's are made
            self.optimizer.step()
            for master in masters:
                master.grad = None
            torch._foreach_copy_(params, masters)
        return stepped

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._params if p.grad is not None]


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients together, computed in fp32."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))


def _widen(pairs: list[Pair]) -> None:
    """Move the gradients of parameters to their masters, in fp32."""
    for _, master in pairs:
        master.grad = torch.empty_like(master)
    torch._foreach_copy_([master.grad for _, master in pairs], [param.grad for param, _ in pairs])
    for param, _ in pairs:
        param.grad = None


def chunks(pairs: list[Pair], most: int) -> Iterator[list[Pair]]:
    """Pairs in order, in groups of at most so many bytes of masters, or of one pair."""
    return in_groups(pairs, lambda pair: pair[1].numel() * pair[1].element_size(), most)
