"""FSDP2: fully sharded data parallelism on DTensors (torch.distributed.fsdp.fully_shard)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bigdit import optim
from bigdit.engines.backward import Backward, StepOutcome
from bigdit.engines.protocol import Engine, Replicas, Shard, compute_dtype
from bigdit.models import Family
from bigdit.models.float8 import gather_in_float8, plain_rows
from bigdit.optim.factored import first_row, sum_over_shards
from bigdit.strategy import FACTORED, Strategy


class Fsdp2Engine(Engine):
    """Each block is a unit, and the rest of the model another. Shards are the masters, gathered in the compute dtype.

    Each micro-batch's gradients are reduce-scattered and accumulated as shards. Reducing them once a step would keep
    whole ones: Flux.1 would take 71.9 GiB instead of 27.9. HSDP's replicas all-reduce shards after the last one.
    fp16 scales the loss dynamically, and skips a step if any process's gradient overflowed.
    """

    model: FSDPModule

    def __init__(self, strategy: Strategy, model: nn.Module, family: Family, *, device: torch.device) -> None:
        self.strategy = strategy
        self.device = device
        _shard([*family.shared(model), *family.blocks(model), model], strategy, device)
        self.model = model
        self._held = [*model.named_parameters(), *model.named_buffers()]
        # Stored now: in a forward pass the model has whole parameters instead.
        self._params: dict[str, DTensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = _masters(strategy, self._params.values())
        self.optimizer = optim.build(
            strategy.optimizer,
            optim.groups(strategy.optimizer, model, self.masters, blocks=family.blocks(model)),
            stochastic_rounding=strategy.precision == "bf16_sr",
        )
        self._backward = Backward(strategy, together=True)
        self.scaler = self._backward.scaler
        if strategy.optimizer_in_backward:
            optim.step_in_backward(
                self.optimizer, self._params.values(), self.masters, taken=lambda: self._backward.taken
            )

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.model.set_requires_all_reduce(last)
        self._backward.run(loss)

    @torch.no_grad()
    def step(self, lr: float, losses: Sequence[torch.Tensor]) -> StepOutcome:
        if self.strategy.optimizer_in_backward:
            self._scale()
            return StepOutcome(self._backward.taken)
        optim.set_lr(self.optimizer, lr)
        stepped, factor = self._backward.decide(losses, self._norm)
        if stepped.taken and factor is not None:
            torch._foreach_mul_([gradient.to_local() for gradient in self._gradients()], factor)
        if stepped.taken:
            for param, master in zip(self._params.values(), self.masters, strict=True):
                if param is not master:
                    whole = isinstance(master, DTensor) or param.grad is None
                    master.grad = param.grad if whole else param.grad.to_local()
            self.optimizer.step()
            self._scale()
        for tensor in (*self._params.values(), *self.masters):
            tensor.grad = None
        return stepped

    def publish(self) -> None:
        self._scale()

    def _scale(self) -> None:
        """Compute the scales of weights that are gathered in FP8, in one collective for all. Before the first step each
        gather computes its own, because a checkpoint may still change masters."""
        if self.strategy.float8 == "tensorwise" and not self.strategy.cpu_offload:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Free weights that stay gathered for a backward pass: otherwise the next step would use them."""
        with super().evaluating():
            try:
                yield
            finally:
                for module in self.model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

    def _norm(self) -> torch.Tensor:
        """The norm of all gradients of all processes."""
        gradients = self._gradients()
        squares = nn.utils.get_total_norm([each.to_local() for each in gradients]).square_()
        return sum_over_shards(squares, gradients[0]).sqrt_()

    def _gradients(self) -> list[DTensor]:
        return [param.grad for param in self._params.values() if param.grad is not None]

    def shards(self) -> list[Shard]:
        held = enumerate(self._params.items())
        return [_rows(name, param, i) for i, (name, param) in held if param.to_local().numel()]

    def replicas(self) -> Replicas | None:
        """HSDP's replicas of the same shard."""
        if self.strategy.dp_replicate == 1:
            return None
        mesh = self._held[0][1].device_mesh
        ranks = tuple(dist.get_process_group_ranks(mesh.get_group("dp_replicate")))
        return Replicas(ranks, self._held, masters=True)


@torch.no_grad()
def _masters(strategy: Strategy, params: Collection[DTensor]) -> list[torch.Tensor]:
    """The tensors that the optimizer steps: this process's rows as plain tensors.

    DTensor plans each operation over all processes, which takes longer than the step itself. Factored optimizers and
    Muon need DTensors for whole weights, and steps in the backward pass need them for hooks.
    """
    rows = [plain_rows(param) for param in params]
    if strategy.optimizer.name not in (*FACTORED, "muon") and not strategy.optimizer_in_backward:
        return [each.detach() for each in rows]
    return [
        param if each is param.to_local() else DTensor(each, param._spec, requires_grad=False)
        for param, each in zip(params, rows, strict=True)
    ]


def _rows(name: str, param: DTensor, master: int) -> Shard:
    """The rows of `param` on this process, which are consecutive."""
    row = param.numel() // param.shape[0]
    return Shard(name, tuple(param.shape), first_row(param) * row, master, 0, param.to_local().numel())


def _shard(units: list[nn.Module], strategy: Strategy, device: torch.device) -> None:
    """Move the model from CPU memory to the device as shards, one unit at a time, so that at most one is whole.

    `units`: inner before outer ones, the model last. Units that the model shares with a block are called outside it
    too. Their inputs need no gradient, so FSDP2 reduces their gradients once, at the end.
    """
    dtype = compute_dtype(strategy)
    master = dtype if strategy.precision == "bf16_sr" else torch.float32
    mesh = _mesh(strategy, device)
    # The step casts inputs: FSDP2's own cast would round t, which the embedding needs in fp32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # None keeps the root unit gathered after the forward pass, because the backward pass needs it first.
    reshard = None if strategy.reshard_after_forward else False
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if strategy.cpu_offload else OffloadPolicy()

    def place(tensor: torch.Tensor) -> torch.Tensor:
        # Values are already rounded to the compute dtype, as in every engine. Frozen tensors need no master.
        return tensor.to(device, master if tensor.requires_grad else tensor.dtype)

    moved: set[nn.Module] = set()
    for unit in units:
        for module in unit.modules():
            if module not in moved:
                module._apply(place, recurse=False)  # layers of a quantised base quantise their weights here
                if strategy.float8 == "tensorwise":
                    gather_in_float8(module)
            moved.add(module)
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)


def _mesh(strategy: Strategy, device: torch.device) -> device_mesh.DeviceMesh:
    """A mesh of all processes; with HSDP a row for each replica of the model."""
    if strategy.dp_replicate == 1:
        return device_mesh.init_device_mesh(device.type, (strategy.world_size,))
    shape = (strategy.dp_replicate, strategy.dp_shard)
    return device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
