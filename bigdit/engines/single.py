"""One process: plain PyTorch, with fp32 master weights beside bf16 or fp16 ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from bigdit import optim
from bigdit.engines.finite import are_finite, is_finite
from bigdit.engines.protocol import Stepped
from bigdit.engines.scaling import LossScaler
from bigdit.engines.shards import Shard, whole
from bigdit.spec import Strategy
from bigdit.units import MIB

# The fp32 gradients that exist at once. All of them would cost 4 bytes a parameter and decide the peak.
CHUNK_BYTES = 256 * MIB


class SingleEngine:
    """bf16 and fp16 keep fp32 masters, and turn the gradients to fp32 chunk by chunk as the optimizer takes them.

    In the other precisions the parameters are their own masters. fp16 scales the loss dynamically.
    """

    def __init__(self, strategy: Strategy, model: nn.Module, *, device: torch.device) -> None:
        self.strategy = strategy
        self.device = device
        self.model = model.to(device)
        self._named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._params = [p for _, p in self._named]
        self._mixed = strategy.precision in ("bf16", "fp16")
        self.masters = [p.detach().float() for p in self._params] if self._mixed else list(self._params)
        self.optimizer = optim.build(
            strategy.optimizer, self.masters, stochastic_rounding=strategy.precision == "bf16_sr"
        )
        self.scaler = LossScaler() if strategy.precision == "fp16" else None
        if strategy.optimizer_in_backward:
            self._taken = True
            optim.step_in_backward(self.optimizer, self._params, self.masters, taken=lambda: self._taken)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if self.strategy.optimizer_in_backward:
            self._taken = are_finite([loss], together=False)
        loss = loss / self.strategy.grad_accum_steps
        (loss if self.scaler is None else loss * self.scaler.scale).backward()

    @torch.no_grad()
    def step(self, lr: float, losses: Sequence[torch.Tensor]) -> Stepped:
        if self.strategy.optimizer_in_backward:
            return Stepped(self._taken)
        optim.set_lr(self.optimizer, lr)
        stepped = self._step_masters(losses) if self._mixed else self._step_params(losses)
        self.optimizer.zero_grad(set_to_none=True)
        return stepped

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def buffers(self) -> Iterable[torch.Tensor]:
        return ()

    def gradients(self) -> Iterable[torch.Tensor]:
        return ()

    def calls(self) -> Iterable[tuple[object, str]]:
        return ()

    def shards(self) -> list[Shard]:
        return whole(self._named)

    def _step_params(self, losses: Sequence[torch.Tensor]) -> Stepped:
        limit, norm = self.strategy.gradient_clipping, None
        if limit is not None:
            norm = nn.utils.clip_grad_norm_(self._params, limit)
        taken = are_finite(losses, together=False) if norm is None else is_finite(norm)
        if taken:
            self.optimizer.step()
        return Stepped(taken, norm)

    def _step_masters(self, losses: Sequence[torch.Tensor]) -> Stepped:
        """Step the masters that have a gradient, a chunk at a time: the optimizer passes over the others."""
        limit = self.strategy.gradient_clipping
        norm: torch.Tensor | None = None
        factor: torch.Tensor | float = 1.0 if self.scaler is None else 1.0 / self.scaler.scale
        if limit is not None or self.scaler is not None:
            norm = _norm([p.grad for p in self._params if p.grad is not None]) * factor
            taken = is_finite(norm) if self.scaler is None else not self.scaler.overflowed(norm)
        else:
            taken = are_finite(losses, together=False)
        stepped = Stepped(taken, None if limit is None else norm)
        if not taken:
            self.model.zero_grad(set_to_none=True)
            return stepped
        if limit is not None and norm is not None:
            factor = factor * (limit / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ has it
        for chunk in _chunks(list(zip(self._params, self.masters, strict=True))):
            for param, master in chunk:
                if param.grad is not None:
                    master.grad = param.grad.float()
                    param.grad = None
                    if norm is not None:
                        master.grad.mul_(factor)
            self.optimizer.step()
            for param, master in chunk:
                master.grad = None
                param.copy_(master)
        return stepped


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients together, in fp32 whatever their dtype."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))


def _chunks(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(parameter, master) pairs in order, in runs of at most CHUNK_BYTES of fp32, or of one."""
    chunk: list[tuple[torch.Tensor, torch.Tensor]] = []
    filled = 0
    for pair in pairs:
        nbytes = pair[1].numel() * pair[1].element_size()
        if chunk and filled + nbytes > CHUNK_BYTES:
            yield chunk
            chunk, filled = [], 0
        chunk.append(pair)
        filled += nbytes
    if chunk:
        yield chunk
