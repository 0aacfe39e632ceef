"""Adafactor (Shazeer & Stern, arXiv:1804.04235, Algorithm 4 with §8's schedule), over weights seen as matrices.

Results equal torch.optim.Adafactor's, except for convolutions: torch factors their last two dimensions, and so keeps
two whole tensors for a 1×1 convolution [O, I, 1, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from bigdit.optim import factored
from bigdit.optim.factored import add_to, excess, local, rms
from bigdit.optim.groups import Groups

# Source: §9 of the paper: ε1, ε2, and the exponent of the decay β̂2 = 1 − t^−0.8.
EPS_SQUARE = 1e-30
EPS_SCALE = 1e-3
DECAY_EXPONENT = -0.8


class Adafactor(Optimizer):
    """Factored second moments (about 0 B per parameter), no momentum, steps relative to a weight's size.

    The relative step size min(lr, 1/√t) is multiplied by RMS(weight), at least 0.001. Vectors have a whole second
    moment. Temporaries: 4 B per element of one weight.
    """

    def __init__(
        self,
        params: Groups,
        *,
        lr: float,
        weight_decay: float = 0.0,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._stochastic_rounding = stochastic_rounding

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter that has a gradient, one after the other."""
        for group in self.param_groups:
            lr, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
            for param in group["params"]:
                if param.grad is not None:
                    update = _update(param, self.state[param], lr)
                    add_to(param, update, 1.0, decay, self._stochastic_rounding)


def _update(param: torch.Tensor, state: factored.State, lr: float) -> torch.Tensor:
    """What is added to `param`. Scalars are multiplied with each other first, which saves passes over the matrix."""
    matrix = factored.as_matrix(param.grad, param)  # type: ignore[arg-type]  # it has a gradient
    if not state:
        state["step"] = 0
        if factored.factors(param):
            factored.start(state, "square", matrix)
        else:
            state["square"] = torch.zeros_like(matrix)
    state["step"] += 1
    weight = state["step"] ** DECAY_EXPONENT  # 1 − β̂2
    if factored.factors(param):
        factored.update(state, "square", matrix, param, weight, EPS_SQUARE)
        factored.divide_by_root_(matrix, state, "square")
    else:
        square = state["square"]
        square.mul_(1 - weight).addcmul_(matrix, matrix, value=weight).add_(EPS_SQUARE, alpha=weight)
        matrix.div_(square.sqrt())
    relative = min(lr, state["step"] ** -0.5)  # ρ
    step = rms(local(param), param, -relative).clamp_(max=-relative * EPS_SCALE)
    return matrix.mul_(step.div_(excess(matrix, param)))
