"""One process: plain PyTorch, with fp32 master weights beside bf16 ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bigdit import optim
from bigdit.spec import Strategy


class SingleEngine:
    """bf16 keeps fp32 masters and turns each gradient to fp32 at the step; fp32 steps the weights themselves."""

    def __init__(self, strategy: Strategy, model: nn.Module, *, device: torch.device) -> None:
        self.strategy = strategy
        self.device = device
        self.model = model.to(device)
        self._named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._params = [p for _, p in self._named]
        self._mixed = strategy.precision != "fp32"
        self.masters = [p.detach().float() for p in self._params] if self._mixed else list(self._params)
        self.optimizer = optim.build(strategy.optimizer, self.masters)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        (loss / self.strategy.grad_accum_steps).backward()

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor | None:
        if self._mixed:
            self._gradients_to_masters()
        norm = None
        if self.strategy.gradient_clipping is not None:
            norm = nn.utils.clip_grad_norm_(self.masters, self.strategy.gradient_clipping)
        optim.set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._mixed:
            torch._foreach_copy_(self._params, self.masters)
        return norm

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for (name, _), master in zip(self._named, self.masters, strict=True):
            yield name, master.detach().float().cpu()

    def _gradients_to_masters(self) -> None:
        for param, master in zip(self._params, self.masters, strict=True):
            if param.grad is not None:
                master.grad = param.grad.float()
                param.grad = None
