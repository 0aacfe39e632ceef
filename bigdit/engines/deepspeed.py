"""DeepSpeed ZeRO 0-3, driven by its own JSON document."""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from bigdit import optim
from bigdit.spec import Strategy


class DeepSpeedEngine:
    """`deepspeed.initialize` over our optimizer; the JSON document decides the rest."""

    def __init__(self, strategy: Strategy, model: nn.Module, *, device: torch.device) -> None:
        self.strategy = strategy
        self.device = device
        params = [p for p in model.parameters() if p.requires_grad]
        self._plain = model
        optimizer = optim.build(strategy.optimizer, params)
        # Some of DeepSpeed's wrappers step once on zero gradients to allocate the state. That must not decay the
        # weights (learning rate 0), nor count in Adam's bias correction (the state is dropped, and comes anew).
        optim.set_lr(optimizer, 0.0)
        self.model, zero, *_ = deepspeed.initialize(
            model=model,
            model_parameters=params,
            optimizer=optimizer,
            config=strategy.ds_config,
            dist_init_required=False,
        )
        self.optimizer = getattr(zero, "optimizer", zero)
        self.optimizer.state.clear()
        self.masters = _masters(zero)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # DeepSpeed divides by gradient_accumulation_steps itself, and counts micro-batches by calls of step.
        self.model.backward(loss)
        if not last:
            self.model.step()

    def step(self, lr: float) -> torch.Tensor | None:
        optim.set_lr(self.optimizer, lr)
        self.model.step()
        norm = self.model.get_global_grad_norm()  # None where DeepSpeed keeps none: stage 0 in fp32
        return None if norm is None else torch.as_tensor(norm)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, param) in enumerate(self._plain.named_parameters()):
            full = safe_get_full_fp32_param(param)
            if full is None:  # stage 0 keeps whole fp32 masters in the order of the parameters
                full = self.masters[i]
            yield name, full.detach().float().cpu()


def _masters(zero: object) -> list[torch.Tensor]:
    """The fp32 tensors that the inner optimizer steps, by the names that each of DeepSpeed's wrappers gives them."""
    if isinstance(zero, torch.optim.Optimizer):  # stage 0 in fp32: no wrapper
        return [p for group in zero.param_groups for p in group["params"]]
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(zero, name):  # stage 3; stages 1 and 2; bf16 with fp32 accumulation
            return list(getattr(zero, name))
    return [master for group in zero.fp32_groups for master in group]  # type: ignore[attr-defined]  # stage 0 in bf16
