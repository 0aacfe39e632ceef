"""prodigyopt's Prodigy (Mishchenko & Defazio, arXiv:2306.06101)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import prodigyopt.prodigy as package
import torch
import torch.distributed as dist

from bigdit.optim.groups import Groups
from bigdit.strategy import OptimizerSpec


class Prodigy(package.Prodigy):
    """AdamW whose rate is lr × d, with d estimated from all weights.

    State: two moments, the initial weights, and a sum of gradients, 16 B per parameter. Processes with shards sum their
    parts of the estimate.
    """

    def __init__(self, spec: OptimizerSpec, params: Groups) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that weight decay is decoupled
            super().__init__(
                params,
                lr=spec.lr,
                betas=spec.betas,
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                d_coef=spec.d_coef,
                safeguard_warmup=spec.safeguard_warmup,
                use_bias_correction=spec.use_bias_correction,
                fsdp_in_use=True,  # also in one process: else it skips an update for a sum of 0
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter that has a gradient."""
        stepped = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not stepped or not any(group["lr"] for group in self.param_groups):
            return
        for param in stepped:
            if not self.state[param]:
                self.start(param)
        with _sums_on(stepped[0].device):
            super().step()
        for group in self.param_groups:  # numbers: each use of a tensor would wait for the GPU
            group.update({key: float(value) for key, value in group.items() if isinstance(value, torch.Tensor)})

    def start(self, param: torch.Tensor) -> bool:
        """Allocate the state of `param`. The package would allocate only one number for weights that are all 0."""
        flat = param.detach().flatten()
        self.state[param] = {
            "step": 0,
            "s": torch.zeros_like(flat),
            "p0": flat.clone(),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
        return True


def _sum(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
    """Sum over processes, if there are several."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor, op=op)


package.dist = SimpleNamespace(all_reduce=_sum, ReduceOp=dist.ReduceOp)


@contextlib.contextmanager
def _sums_on(device: torch.device) -> Iterator[None]:
    """Let the package, which calls `.cuda()`, sum on the CPU if weights are there."""
    cuda = torch.Tensor.cuda
    if device.type == "cpu":
        torch.Tensor.cuda = lambda tensor: tensor
    try:
        yield
    finally:
        torch.Tensor.cuda = cuda
