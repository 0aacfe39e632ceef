"""DeepSpeed ZeRO 0-3, driven by its own JSON document."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partition_parameters import Init, InsertPostInitMethodToModuleSubClasses
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from torch import nn

from bigdit import libraries, optim
from bigdit.config.wrong import shown
from bigdit.engines.backward import LossScaler, StepOutcome, are_finite
from bigdit.engines.protocol import Engine, Replicas, Shard, compute_dtype, whole
from bigdit.errors import UserError
from bigdit.strategy import Strategy

with libraries.uncompiled():  # DeepSpeed imports its Muon to test whether an optimizer is one
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")

# DeepSpeed's collectives for CPUs are for inference only: training on a CPU uses gloo. They take 66 MiB of shared
# memory in each process, and the first process on a machine compiles them for most of a minute. Source:
# inference_all_reduce in deepspeed/comm/torch.py, DeepSpeed 0.19. (deepspeed.comm.torch is another attribute.)
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]

# On a GPU each engine registers passes of DeepSpeed's compiler, which imports torch's compiler: a second at each start.
# Nothing here calls it. Source: DeepSpeedEngine.__init__ in deepspeed/runtime/engine.py, DeepSpeed 0.19.
_runtime = importlib.import_module("deepspeed.runtime.engine")
_runtime.is_deepcompile_supported = lambda: False  # type: ignore[attr-defined]


class DeepSpeedEngine(Engine):
    """`deepspeed.initialize` with bigdit's optimizer; the JSON document decides the rest."""

    def __init__(self, strategy: Strategy, model: nn.Module, *, device: torch.device) -> None:
        self.strategy = strategy
        self.device = device
        self.scaler: LossScaler | None = None  # DeepSpeed scales by itself
        _check_fp16(strategy)
        check_document(strategy)
        model = _on_device(strategy, model, device)
        optimizer = optim.build(strategy.optimizer, optim.groups(strategy.optimizer, model))
        names = {param: name for name, param in model.named_parameters()}
        # In the order of the groups, like DeepSpeed's masters.
        self._trained = [(names[param], param) for group in optimizer.param_groups for param in group["params"]]
        # Some of DeepSpeed's wrappers step once on zero gradients to allocate the state. That must not decay weights
        # (learning rate 0), nor count in Adam's bias correction (the state is cleared afterwards).
        optim.set_lr(optimizer, 0.0)
        self.model, zero, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[param for _, param in self._trained],
            optimizer=optimizer,
            config=strategy.ds_document,
            dist_init_required=False,
        )
        self._zero = zero
        self.optimizer = getattr(zero, "optimizer", zero)
        self.optimizer.state.clear()
        self.masters = _masters(zero)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # DeepSpeed divides by gradient_accumulation_steps, and counts micro-batches by calls of step. It averages
        # gradients over all processes; those of one sample's tokens must be summed.
        self.model.backward(loss if self.strategy.cp == 1 else loss * self.strategy.cp)
        if not last:
            self.model.step()

    def step(self, lr: float, losses: Sequence[torch.Tensor]) -> StepOutcome:
        """DeepSpeed's wrappers skip gradients that are not finite. Stage 0 in fp32 has no wrapper."""
        optim.set_lr(self.optimizer, lr)
        if self._zero is self.optimizer and not are_finite(losses, together=True):
            self._skip_step()
            return StepOutcome(False)
        self.model.step()
        norm = self.model.get_global_grad_norm()  # None where DeepSpeed keeps none: stage 0 in fp32
        taken = not getattr(self._zero, "overflow", False)
        return StepOutcome(taken, None if norm is None else torch.as_tensor(norm))

    @torch.no_grad()
    def publish(self) -> None:
        """Do what each of DeepSpeed's wrappers does at the end of its own step."""
        zero = self._zero
        if self.strategy.zero_stage == 3:
            zero._partition_all_parameters()
            for group in range(len(self.masters)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            if kept := zero.persistent_parameters:
                kept[0].all_gather(kept)
        elif hasattr(zero, "update_lp_params"):  # stages 1 and 2, and bf16 with fp32 accumulation
            zero.update_lp_params()
        elif zero is not self.optimizer:  # stage 0 with masters
            for weights, masters in zip(zero.fp16_groups, zero.fp32_groups, strict=True):
                torch._foreach_copy_(weights, masters)

    def _skip_step(self) -> None:
        """Clear gradients, and let DeepSpeed count the step as a micro-batch that more follow."""
        self.model.zero_grad()
        self.model.set_gradient_accumulation_boundary(False)
        self.model.step()
        self.model.set_gradient_accumulation_boundary(None)  # DeepSpeed's own count again

    @property
    def loss_scale(self) -> float:
        held = getattr(self._zero, "loss_scale_config", self._zero)  # stage 0 has loss_scale_config
        return float(getattr(held, "cur_scale", 1.0))

    def buffers(self) -> Iterable[torch.Tensor]:
        for bucket in getattr(self._zero, "ipg_buckets", {}).values():  # one a dtype; ZeRO-1 and 2 have up to two
            yield from [bucket.buffer] if isinstance(bucket.buffer, torch.Tensor) else bucket.buffer or ()

    def gradients(self) -> Iterable[torch.Tensor]:
        """Gradients that are in neither parameters nor masters: averaged ones, or those of a partition."""
        for name in ("averaged_gradients", "all_grad_tensors", "accumulated_grads_in_cpu"):
            for held in (getattr(self._zero, name, None) or {}).values():
                yield from [held] if isinstance(held, torch.Tensor) else held or ()
        flat = getattr(self._zero, "grad_partitions_flat_buffer", None)  # ZeRO-3
        if flat is not None:
            yield flat

    def calls(self) -> Iterable[tuple[object, str]]:
        """(object, method) in which DeepSpeed allocates buckets and gathered weights."""
        for name in ("setup_buckets", "reduce_ipg_grads", "independent_gradient_partition_epilogue"):
            if hasattr(self._zero, name):
                yield self._zero, name
        offload = getattr(self._zero, "parameter_offload", None)  # ZeRO-3
        if offload is not None:
            yield offload.get_param_coordinator(), "fetch_sub_module"

    def shards(self) -> list[Shard]:
        trained = self._trained
        if self.strategy.zero_stage == 3:
            shards = (self._stage_3_shard(name, param) for name, param in trained)
        elif hasattr(trained[0][1], "_hp_mapping"):  # stages 1 and 2, and bf16 with fp32 accumulation
            shards = (_flat_group_shard(name, param) for name, param in trained)
        else:
            return whole(trained)
        return [shard for shard in shards if shard is not None]

    def replicas(self) -> Replicas:
        """ZeRO-3 replicates small parameters, lower stages all parameters, and stage 0 masters too."""
        held = [*self.model.module.named_parameters(), *self.model.module.named_buffers()]
        weights = [(name, each) for name, each in held if getattr(each, "ds_persist", True)]
        return Replicas(tuple(range(dist.get_world_size())), weights, masters=self.strategy.zero_stage == 0)

    def _stage_3_shard(self, name: str, param: Any) -> Shard | None:
        """ZeRO-3 splits each parameter into one equal run for each process; the last ones are padded."""
        group, start, room = self._zero.grad_position[self._zero.get_param_id(param)]
        offset = dist.get_rank(param.ds_process_group) * room
        length = min(room, param.ds_numel - offset)
        return Shard(name, tuple(param.ds_shape), offset, group, start, length) if length > 0 else None


def _flat_group_shard(name: str, param: Any) -> Shard | None:
    """ZeRO-1 and 2 split a group's concatenated parameters into equal runs: a process has some, or a part of one."""
    mapping = param._hp_mapping
    if mapping is None:
        return None
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Shard(name, tuple(param.shape), here.start, mapping.param_group_index, there.start, here.numel)


def forget(engine: Engine | None = None) -> None:
    """Undo ZeRO-3's changes to the whole process, so that another engine can be made. `engine` is destroyed: hooks in
    gradient accumulators refer to it."""
    if engine is not None:
        engine.model.destroy()
    if F.linear is zero3_linear_wrap:
        F.linear = Init.linear_bk
    if hasattr(Init, "linear_bk"):
        del InsertPostInitMethodToModuleSubClasses.linear_bk
    Init.num_persisted_parameters = Init.num_persisted_elements = 0


def _check_fp16(strategy: Strategy) -> None:
    if strategy.precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise UserError(
            f"strategy.precision is fp16, which DeepSpeed does not train in on this {get_accelerator().device_name()}; "
            "use strategy.precision bf16 or fp32, or strategy.engine single"
        )


def check_document(strategy: Strategy) -> None:
    """Raise UserError for keys and values that DeepSpeed rejects."""
    rejected = "strategy.ds_config: DeepSpeed rejects it"
    try:
        DeepSpeedConfig(strategy.ds_document)
    except ValidationError as error:
        raise UserError(*(f"{rejected}: {_problem(detail)}" for detail in error.errors(include_url=False))) from None
    except Exception as error:  # DeepSpeed's own and assertions: all are about the document
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{rejected}: {reason}") from error


def _problem(detail: ErrorDetails) -> str:
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    return f"{key} is {shown(detail['input'])}: {detail['msg']}"


def _on_device(strategy: Strategy, model: nn.Module, device: torch.device) -> nn.Module:
    """The model on its device; with ZeRO-3 one parameter at a time, so that it is never whole there."""
    if strategy.zero_stage == 3:
        Init(module=model, config_dict_or_path=strategy.ds_document, dtype=compute_dtype(strategy))
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(device), name not in module._non_persistent_buffers_set)
        return model
    return model.to(device)


def _masters(zero: object) -> list[torch.Tensor]:
    """The fp32 tensors that the inner optimizer steps: each of DeepSpeed's wrappers has another name for them."""
    if isinstance(zero, torch.optim.Optimizer):  # stage 0 in fp32: no wrapper
        return [p for group in zero.param_groups for p in group["params"]]
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(zero, name):  # stage 3; stages 1 and 2; bf16 with fp32 accumulation
            return list(getattr(zero, name))
    return [master for group in zero.fp32_groups for master in group]  # type: ignore[attr-defined]  # stage 0 in bf16
