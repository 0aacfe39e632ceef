"""torch's Muon (Jordan et al., 2024) for matrices in blocks and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from bigdit.optim.factored import first_row
from bigdit.optim.groups import Groups

MATCH = "match_rms_adamw"
"""Updates as large as AdamW's, so that both share one rate. Source: Liu et al., arXiv:2502.16982, §2.2."""


class Muon(Optimizer):
    """torch.optim.Muon over the groups with `muon` set, torch.optim.AdamW over the others.

    State: momentum (4 B per parameter), or AdamW's. A sharded matrix (a DTensor) has a shard of the momentum. Each
    process gathers the update, 2 B per element of one matrix, and steps its own rows.
    """

    def __init__(
        self, params: Groups, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"muon": False} | (each if isinstance(each, dict) else {"params": [each]}) for each in params
        ]
        matrices, rest = ([each for each in groups if each["muon"] == kind] for kind in (True, False))
        self._inner: dict[bool, Optimizer] = {}  # they share the group objects
        if matrices:
            self._inner[True] = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn=MATCH)
        if rest:
            adamw = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            self._inner[False] = torch.optim.AdamW(rest, **adamw, fused=True)
        super().__init__(groups, {})
        for inner in self._inner.values():
            inner.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["muon"] and isinstance(group["params"][0], DTensor):
                for param in group["params"]:
                    if param.grad is not None:
                        self._step_shard(param, group)
                continue
            inner = self._inner[group["muon"]]
            inner.param_groups = [group]
            inner.step()

    def start(self, param: torch.Tensor) -> bool:
        """Allocate the state of a matrix, without the communication of a step. Returns False for AdamW's parameters."""
        own = any(each is param for group in self.param_groups if group["muon"] for each in group["params"])
        if own:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        return own

    def _step_shard(self, param: DTensor, group: dict[str, Any]) -> None:
        """torch's step of a matrix, with the whole update on each process.

        torch multiplies parts of DTensors: bf16 rounds differently, and a process without rows raises an error.

        Source: _single_tensor_muon in torch/optim/_muon.py, torch 2.11 to 2.15.
        """
        if not self.state[param]:
            self.start(param)
        local, gradient = param.to_local(), param.grad.to_local()
        momentum = self.state[param]["momentum_buffer"].to_local()
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]).bfloat16()  # torch's dtype of the products
        parts = DTensor.from_local(
            update, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        whole = parts.full_tensor()
        del update, parts
        whole = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        first = first_row(param)
        rows = whole[first : first + len(local)]
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.add_(rows, alpha=-_adjust_lr(group["lr"], MATCH, param.shape))
