"""CAME: confidence-guided adaptive memory-efficient optimization (Luo et al., arXiv:2307.02047, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from bigdit import libraries
from bigdit.optim import factored
from bigdit.optim.factored import State, add_to, excess
from bigdit.optim.groups import Groups

# Source: the paper's released code (github.com/yangluo7/CAME); Algorithm 2 calls them ε1 and ε2.
EPS_SQUARE = 1e-30
EPS_RESIDUAL = 1e-16


class Came(Optimizer):
    """fp32 momentum (4 B per parameter; `eight_bit`: 1.016 B), and factored statistics of squares and confidence.

    Weights of several dimensions are matrices [O, rest], sharded by rows or whole. Vectors have a whole second moment,
    and no confidence. Temporaries: 4 B per element of one weight (8-bit: 9 B).
    `betas`: β1 of the momentum, β2 of the squares, β3 of the confidence. Weight decay is decoupled.
    """

    def __init__(
        self,
        params: Groups,
        *,
        lr: float,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        eight_bit: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self._states = EightBitStates(eight_bit)
        self._stochastic_rounding = stochastic_rounding

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter that has a gradient, one after the other."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = self._update(param, self.state[param], *group["betas"])
                    decay = 1 - group["lr"] * group["weight_decay"]
                    add_to(param, update, -group["lr"], decay, self._stochastic_rounding)

    def _update(
        self, param: torch.Tensor, state: factored.State, beta1: float, beta2: float, beta3: float
    ) -> torch.Tensor:
        matrix = factored.as_matrix(param.grad, param)
        if not state:
            self._start(param, state, matrix)
        self._normalise_(matrix, param, state, beta2)
        matrix.div_(excess(matrix, param))  # û
        momentum = self._states.fetch(state, "exp_avg", signed=True)
        momentum.lerp_(matrix, 1 - beta1)  # m
        self._states.keep(state, "exp_avg", momentum, signed=True)
        if not factored.factors(param):
            return matrix.copy_(momentum)
        # U = (û − m)²: the farther the momentum is from the update, the lower is the confidence.
        factored.update(state, "residual", matrix.sub_(momentum), param, 1 - beta3, EPS_RESIDUAL)
        return factored.divide_by_root_(matrix.copy_(momentum), state, "residual")  # m / √S

    def _start(self, param: torch.Tensor, state: factored.State, matrix: torch.Tensor) -> None:
        self._states.start(state, "exp_avg", matrix)
        if factored.factors(param):
            factored.start(state, "square", matrix)
            factored.start(state, "residual", matrix)
        else:
            self._states.start(state, "square", matrix)

    def _normalise_(self, grad: torch.Tensor, param: torch.Tensor, state: factored.State, beta2: float) -> None:
        """u = g / √v, in place."""
        if factored.factors(param):
            factored.update(state, "square", grad, param, 1 - beta2, EPS_SQUARE)
            factored.divide_by_root_(grad, state, "square")
            return
        square = self._states.fetch(state, "square", signed=False)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2).add_(EPS_SQUARE, alpha=1 - beta2)
        self._states.keep(state, "square", square, signed=False)
        grad.div_(square.sqrt())


BLOCK = 256  # elements that share an fp32 scale: 1 + 4 / 256 B an element
SMALLEST = 4096  # fewer elements stay in fp32, as in bitsandbytes


class EightBitStates:
    """Keeps fp32 states as `<name>` uint8 and `<name>_absmax`; in fp32 if it is off, and for small tensors."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._maps: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def start(self, state: State, name: str, like: torch.Tensor) -> None:
        """A zero state of the shape of fp32 `like`."""
        if not self._on or like.numel() < SMALLEST:
            state[name] = torch.zeros_like(like)
            return
        # Scales of zero make the values zero, whatever their codes are.
        state[name] = torch.zeros_like(like, dtype=torch.uint8)
        state[f"{name}_absmax"] = like.new_zeros(-(-like.numel() // BLOCK))

    def fetch(self, state: State, name: str, *, signed: bool) -> torch.Tensor:
        """The state in fp32, or a copy, which must be given to `keep` after a change."""
        absmax = state.get(f"{name}_absmax")
        if absmax is None:
            return state[name]
        code = self._map(absmax.device, signed)
        return torch.ops.bitsandbytes.dequantize_blockwise(state[name], absmax, code, BLOCK, torch.float32)

    def keep(self, state: State, name: str, value: torch.Tensor, *, signed: bool) -> None:
        """Store the changed result of `fetch`."""
        absmax = state.get(f"{name}_absmax")
        if absmax is not None:
            codes, scales = torch.ops.bitsandbytes.quantize_blockwise(value, self._map(absmax.device, signed), BLOCK)
            state[name].copy_(codes)
            absmax.copy_(scales)

    def _map(self, device: torch.device, signed: bool) -> torch.Tensor:
        """The 256 values of the codes, dense near zero (§1.3 of the paper)."""
        if (device, signed) not in self._maps:
            with libraries.uncompiled():
                from bitsandbytes.functional import create_dynamic_map  # late: bitsandbytes probes CUDA

            self._maps[device, signed] = create_dynamic_map(signed=signed).to(device)
        return self._maps[device, signed]
