"""The contracts between the layers: what is trained (ModelSpec), on what (BatchShape), how (Strategy)."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

EngineName = Literal["single", "deepspeed", "fsdp2"]
OptimizerName = Literal["adamw", "adamw_8bit"]
Precision = Literal["fp32", "bf16"]


class Strict(BaseModel):
    """A value: unknown keys are errors, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def digest(self) -> str:
        """Sixteen hex digits that name this value, for caches and checks of identity."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class ModelSpec(Strict):
    """A diffusion transformer: the diffusers class, its constructor arguments, and what it is fed."""

    name: str
    class_name: str
    kwargs: dict[str, Any]


class BatchShape(Strict):
    """Shapes of one sample: latents (channels, height, width); text (tokens, dim), None without text."""

    latents: tuple[PositiveInt, PositiveInt, PositiveInt]
    text: tuple[PositiveInt, PositiveInt] | None = None


class OptimizerSpec(Strict):
    """An optimizer of bigdit/optim and its constants (Loshchilov & Hutter, arXiv:1711.05101)."""

    name: OptimizerName = "adamw"
    lr: PositiveFloat = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)


class ObjectiveSpec(Strict):
    """Flow matching: how t is drawn. `shift` above 1 moves t towards noise, as high resolutions need."""

    name: Literal["flow_matching"] = "flow_matching"
    t_distribution: Literal["logit_normal", "uniform"] = "logit_normal"
    shift: PositiveFloat = 1.0


class Strategy(Strict):
    """How the step is run: the one contract that plans emit, engines consume and rehearsals run.

    `bf16` is bf16 weights, gradients and activations with fp32 master weights and optimizer state, in every
    engine. `checkpointed_blocks`: the first k transformer blocks are recomputed in the backward pass.
    `ds_config` is DeepSpeed's own document, complete, and goes to it as it stands.
    """

    engine: EngineName = "single"
    world_size: PositiveInt = 1
    micro_batch_size: PositiveInt = 1
    grad_accum_steps: PositiveInt = 1
    precision: Precision = "bf16"
    optimizer: OptimizerSpec = OptimizerSpec()
    checkpointed_blocks: int | Literal["all"] = Field(default=0)
    gradient_clipping: PositiveFloat | None = None
    ds_config: dict[str, Any] | None = None
    reshard_after_forward: bool = True

    @model_validator(mode="after")
    def _coherent(self) -> Strategy:
        if self.engine == "single" and self.world_size != 1:
            raise ValueError(f"engine single runs one process, and world_size is {self.world_size}")
        if (self.engine == "deepspeed") != (self.ds_config is not None):
            raise ValueError("ds_config belongs to the engine deepspeed, and to no other")
        if self.engine == "fsdp2" and self.optimizer.name == "adamw_8bit":
            raise ValueError(
                "optimizer.name adamw_8bit (bitsandbytes) cannot step FSDP2's sharded DTensors; "
                "use optimizer.name adamw, or engine.name deepspeed"
            )
        if isinstance(self.checkpointed_blocks, int) and self.checkpointed_blocks < 0:
            raise ValueError(f"checkpointed_blocks is {self.checkpointed_blocks}; 0 or more, or all")
        return self

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all processes."""
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    def with_micro_batch_size(self, micro_batch_size: int) -> Strategy:
        """The same strategy at another micro-batch size, in DeepSpeed's document too."""
        ds_config = self.ds_config and self.ds_config | {"train_micro_batch_size_per_gpu": micro_batch_size}
        return self.model_copy(update={"micro_batch_size": micro_batch_size, "ds_config": ds_config})

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's ZeRO stage; None for the other engines."""
        if self.ds_config is None:
            return None
        return int(self.ds_config.get("zero_optimization", {}).get("stage", 0))
