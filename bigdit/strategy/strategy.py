"""How a step is run: the one contract between a run's YAML, plans, attempts and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from bigdit.documents import Count, Degree, Natural, Positive, Switch
from bigdit.strategy.deepspeed import PRECISIONS, Document, Values, complete, split
from bigdit.strategy.values import (
    BITSANDBYTES,
    OPTIMIZERS,
    PACKAGES,
    TORCHAO,
    ControlNetSpec,
    EmaSpec,
    LoraBase,
    LoraSpec,
    OptimizerSpec,
    Section,
    SegmentSpec,
    Strict,
)

EngineName = Literal["single", "ddp", "deepspeed", "fsdp2"]
Precision = Literal["fp32", "tf32", "bf16", "bf16_sr", "fp16"]
Float8 = Literal["none", "tensorwise", "rowwise"]

LEAST_SWAPPED = 3
"""The fewest blocks to swap: two of them are always on the device."""

MOST_GPUS = 4096
"""The most processes: NCCL's memory and the time of collectives are not known beyond that."""

_GLOBAL = "global_batch_size"

_FORWARD_ONLY = {"checkpointed_blocks": 0, "offload_activations": False, "compile_blocks": False, "float8": "none"}
"""Settings without what only a backward pass needs, or what costs more time than a few forward passes save."""


class StepSize(Strict):
    """The keys of Strategy that trade memory for time at the same global batch."""

    micro_batch_size: Count
    grad_accum_steps: Count
    checkpointed_blocks: Natural | Literal["all"]
    checkpointing: Literal["full", "selective"] = "full"
    checkpointed_segments: SegmentSpec | None = None


class Contradictory(ValueError):
    """Keys of a Strategy that exclude each other: `problems`, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Strategy(Section):
    """How a step runs. Plans write it into a run's YAML, and engines obey it."""

    engine: EngineName = "single"
    """What runs the step: one process, DDP (a replica of the model on each GPU), DeepSpeed or FSDP2."""
    world_size: Annotated[Count, Field(le=MOST_GPUS)] = 1
    """Processes, one for each GPU. `bigdit train` starts them on this machine; another launcher must start that
    many."""
    micro_batch_size: Count = 1
    """Samples per process in one pass."""
    grad_accum_steps: Count = 1
    """Micro-batches per process in an optimizer step."""
    repeated_samples: Natural = 0
    """Samples of an optimizer step that are repeated with weight 0, so that all micro-batches are full. It is computed
    from global_batch_size, if the GPUs do not divide it."""
    precision: Precision = "bf16"
    """The dtype of weights, gradients and activations. `bf16` and `fp16` have fp32 master weights and optimizer state,
    fp16 with dynamic loss scaling. `bf16_sr` has no masters and rounds updates stochastically into bf16 weights. `tf32`
    is fp32 with TF32 matrix products."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer of the weights."""
    optimizer_in_backward: Switch = False
    """Step each parameter as soon as it has its gradient, and free the gradient at once."""
    checkpointed_blocks: Natural | Literal["all"] = 0
    """Activation checkpointing: the number of first transformer blocks that are recomputed in the backward pass."""
    checkpointing: Literal["full", "selective"] = "full"
    """What a checkpointed block recomputes: everything, or all but matrix products and attention."""
    checkpointed_segments: SegmentSpec | None = None
    """Recompute the checkpointed blocks in segments, or only some of them. null: each block is a segment. With it,
    checkpointed_blocks is `all` by default."""
    offload_activations: Switch = False
    """Keep activations that autograd saves in CPU memory."""
    compile_blocks: Switch = False
    """Compile the repeated block with torch.compile."""
    float8: Float8 = "none"
    """Matrix products of the repeated block's linear layers in FP8, by torchao. Weights, activations and gradients are
    cast with one scale each (tensorwise), or one per row (rowwise)."""
    blocks_to_swap: Natural = 0
    """Block swap: the number of first blocks whose weights are in CPU memory. The GPU holds two of them at a time. With
    `lora` or `controlnet`, only frozen weights are swapped, else all."""
    gradient_clipping: Positive | None = 1.0
    """The largest norm of all gradients. null: no clipping."""
    ema: EmaSpec | None = None
    """An EMA of the weights."""
    lora: LoraSpec | None = None
    """Train adapters over the frozen weights of model.init_from."""
    controlnet: ControlNetSpec | None = None
    """Train a ControlNet beside the frozen weights of model.init_from. Its blocks come after those of the model in
    other keys."""
    features: Literal["cached", "online"] = "cached"
    """Where latents and embeddings come from. cached: the cache in data.features. online: frozen encoders on the
    training GPU encode in each step."""
    encode_chunk: Count | None = None
    """With features online: samples that are encoded at once. Default: one; null: the whole micro-batch."""
    read_ahead_steps: Natural = 2
    """Steps that the loader reads ahead into CPU memory."""
    ds_config: dict[str, Any] | None = None
    """DeepSpeed's JSON document: a mapping, or a file. Values that other keys set are "auto" there, or left out."""
    cp: Degree = 1
    """Context parallelism: the number of neighbouring processes that share each sample. Each has a part of its
    tokens."""
    cp_ring: Degree = 1
    """Ring attention: the number of groups, of the cp processes, that pass keys and values round. The processes of a
    group exchange tokens for heads (Ulysses), so cp / cp_ring must divide the heads of attention."""
    dp_replicate: Count = 1
    """FSDP2: copies of the model, each sharded over world_size / dp_replicate processes (HSDP)."""
    reshard_after_forward: Switch = True
    """FSDP2: free gathered weights until the backward pass."""
    cpu_offload: Switch = False
    """FSDP2: keep shards, their gradients and the optimizer state in CPU memory."""

    also: ClassVar[dict[str, str]] = {
        _GLOBAL: "Samples of an optimizer step over all processes. grad_accum_steps is computed from it. If "
        "the GPUs do not divide it, the last micro-batch has repeated samples of weight 0."
    }

    @model_validator(mode="before")
    @classmethod
    def _accumulated(cls, given: Any) -> Any:
        """Compute grad_accum_steps and repeated_samples from global_batch_size, if that is given."""
        if not isinstance(given, dict):
            return given
        found = {key: value for key, value in given.items() if key not in (_GLOBAL, "grad_accum_steps")}
        if found.get("features") == "online":
            found.setdefault("encode_chunk", 1)
        if found.get("checkpointed_segments") is not None:
            found.setdefault("checkpointed_blocks", "all")
        whole, accum = given.get(_GLOBAL), given.get("grad_accum_steps")
        if whole is None:
            return found if accum is None else found | {"grad_accum_steps": accum}
        if accum is not None:
            raise Contradictory(
                [f"{_GLOBAL} is {whole} and grad_accum_steps {accum}, and one follows from the other; leave one out"]
            )
        size, processes, cp = (found.get(key, 1) for key in ("micro_batch_size", "world_size", "cp"))
        if not all(isinstance(each, int) and each > 0 for each in (size, processes, cp)) or processes > MOST_GPUS:
            return found  # the fields' own checks report it
        if not isinstance(whole, int) or isinstance(whole, bool) or whole < 1:
            raise Contradictory([f"{_GLOBAL} is {whole!r}, and a whole number of 1 or more was expected"])
        if processes % cp:
            return found  # _engine_problems reports it
        one_pass = size * processes // cp
        passes = -(-whole // one_pass)
        return found | {"grad_accum_steps": passes, "repeated_samples": passes * one_pass - whole}

    @model_validator(mode="after")
    def _coherent(self) -> Strategy:
        problems = [*_engine_problems(self), *_optimizer_problems(self), *_memory_problems(self)]
        problems += [*_context_problems(self), *_compile_problems(self), *_float8_problems(self), *_text_problems(self)]
        if self.ds_config is not None and self.engine == "deepspeed":
            document, found = split(self.ds_config, _deepspeed_values(self))
            problems += found
            object.__setattr__(self, "ds_config", document)  # one place for each value
        if problems:
            raise Contradictory(problems)
        return self

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step over all processes."""
        return self.places - self.repeated_samples

    @property
    def places(self) -> int:
        """Samples of an optimizer step, with those that are repeated with weight 0."""
        return self.micro_batch_size * self.grad_accum_steps * self.dp

    @property
    def step_size(self) -> StepSize:
        """The keys that may change after an out-of-memory error."""
        return StepSize(**{key: getattr(self, key) for key in StepSize.model_fields})

    @property
    def dp(self) -> int:
        """The micro-batches that run at once: `cp` processes share each."""
        return self.world_size // self.cp

    @property
    def dp_shard(self) -> int:
        """The processes that FSDP2 shards one copy of the model over."""
        return self.world_size // self.dp_replicate

    @property
    def ds_document(self) -> Document:
        """The document for DeepSpeed: ds_config with the values of other keys."""
        return complete(self.ds_config or {}, _deepspeed_values(self))

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's ZeRO stage; None for the other engines."""
        if self.ds_config is None:
            return None
        section = self.ds_config.get("zero_optimization")
        stage = section.get("stage") if isinstance(section, dict) else 0
        return stage if isinstance(stage, int) else 0  # `split` reports other values

    @property
    def forward_only(self) -> Strategy:
        """The same strategy without what only a backward pass needs."""
        return self.model_copy(update=_FORWARD_ONLY)

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights stay as they are."""
        return self.lora is not None or self.controlnet is not None

    @property
    def trains_text(self) -> bool:
        """Whether adapters of text encoders are trained."""
        return self.lora is not None and self.lora.text_encoders

    @property
    def text_dtype(self) -> Literal["fp32", "bf16"] | None:
        """The dtype of text encoders whose adapters are trained; None where none are."""
        if not self.trains_text:
            return None
        return "fp32" if self.precision in ("fp32", "tf32") else "bf16"

    @property
    def text_lr_factor(self) -> float:
        """The learning rate of text encoders, divided by the optimizer's."""
        own = None if self.lora is None else self.lora.text_encoder_lr
        return 1.0 if own is None else own / self.optimizer.lr

    @property
    def base(self) -> LoraBase | None:
        """The dtype of frozen weights; None where none are."""
        trained = self.lora or self.controlnet
        return None if trained is None else trained.base

    @property
    def packed(self) -> bool:
        """Whether frozen weights are quantised."""
        return self.base not in (None, "bf16")

    @property
    def base_key(self) -> str:
        """The key of `base`."""
        return "controlnet.base" if self.lora is None else "lora.base"

    @property
    def optimizer_in_cpu_memory(self) -> bool:
        """Whether master weights and optimizer state are in CPU memory, where the CPU steps them."""
        offload = (self.ds_config or {}).get("zero_optimization", {}).get("offload_optimizer") or {}
        return self.cpu_offload or offload.get("device", "none") != "none"

    def with_micro_batch_size(self, micro_batch_size: int) -> Strategy:
        """The same strategy at another micro-batch size."""
        found = self.model_copy(update={"micro_batch_size": micro_batch_size})
        return found.model_copy(update={"repeated_samples": min(self.repeated_samples, found.places - 1)})

    def settled(
        self,
        *,
        micro_batch_size: int,
        grad_accum_steps: int,
        checkpointed_blocks: int | Literal["all"],
        global_batch_size: int | None = None,
    ) -> Strategy:
        """The same strategy at these sizes; places beyond the global batch have repeated samples."""
        places = micro_batch_size * grad_accum_steps * self.dp
        sizes = {
            "micro_batch_size": micro_batch_size,
            "grad_accum_steps": grad_accum_steps,
            "checkpointed_blocks": checkpointed_blocks,
            "repeated_samples": max(places - (global_batch_size or places), 0),
        }
        return self.model_copy(update=sizes)

    def over(self, world_size: int) -> dict[str, Any]:
        """The keys that change for `world_size` processes, with the same global batch.

        Micro-batches are no larger than the passes need. HSDP has fewer or more copies of the model.
        """
        whole, dp = self.global_batch_size, max(world_size // self.cp, 1)
        passes = -(-whole // (self.micro_batch_size * dp))
        size = -(-whole // (passes * dp))
        found = {"world_size": world_size, "micro_batch_size": size, "grad_accum_steps": passes}
        copies = world_size // self.dp_shard if self.dp_replicate > 1 else 1
        return found | {"repeated_samples": size * passes * dp - whole, "dp_replicate": copies}

    def sized(self, size: StepSize) -> Strategy:
        """The same strategy with steps of this size."""
        return self.model_copy(update=dict(size))


def _text_problems(strategy: Strategy) -> Iterator[str]:
    """Settings in which text encoders run in no step, or whose gradients with them were not tried."""
    if not strategy.trains_text:
        return
    key = "lora.text_encoders is true"
    if strategy.features != "online":
        yield f"{key}, and features is {strategy.features}: the encoders run in no step; set it to online"
    if strategy.engine not in ("single", "ddp"):
        engines = _either(("single", "ddp"), strategy.world_size)
        yield f"{key}, and engine is {strategy.engine}, which shards them; use engine {engines}, or leave it out"
    others = ("blocks_to_swap", "compile_blocks", "offload_activations", "optimizer_in_backward")
    yield from (
        f"{key}, and was not tried with {each}; leave one of them out" for each in others if getattr(strategy, each)
    )
    if strategy.precision == "fp16":
        yield f"{key}, and precision is fp16, which the encoders do not take; set it to bf16 or fp32"
    if strategy.float8 != "none":
        yield f"{key}, and was not tried with float8; leave one of them out"
    if strategy.optimizer.name == "prodigy" and strategy.text_lr_factor != 1:
        yield "lora.text_encoder_lr is set, and prodigy has one learning rate for all; leave it out"


def swap_misfit(blocks_to_swap: int, blocks: int) -> str | None:
    """Why a model with `blocks` cannot swap `blocks_to_swap` of them; None if it can."""
    if blocks < LEAST_SWAPPED:
        return (
            f"strategy.blocks_to_swap is {blocks_to_swap}, and the model has {blocks} blocks: the weights of two are "
            "always on the device, and none are left to swap; set it to 0"
        )
    if blocks_to_swap <= blocks:
        return None
    return (
        f"strategy.blocks_to_swap is {blocks_to_swap}, and the model has {blocks} blocks; set it to {LEAST_SWAPPED} to "
        f"{blocks}, or to 0"
    )


def _deepspeed_values(strategy: Strategy) -> Values:
    return {
        "train_micro_batch_size_per_gpu": (strategy.micro_batch_size, "micro_batch_size"),
        "gradient_accumulation_steps": (strategy.grad_accum_steps, "grad_accum_steps"),
        "gradient_clipping": (strategy.gradient_clipping or 0.0, "gradient_clipping"),
        **{name: (strategy.precision == name, "precision") for name in PRECISIONS},
        # Our optimizers are torch's and bitsandbytes'. DeepSpeed's list of tested ones knows only some by class. With
        # offload it needs its DeepSpeedCPUAdam, which compiles for a minute; torch's fused AdamW steps on the CPU too.
        "zero_allow_untested_optimizer": (True, "optimizer"),
        "zero_force_ds_cpu_optimizer": (False, "optimizer"),
    }


def _engine_problems(strategy: Strategy) -> Iterator[str]:
    engine = strategy.engine
    if engine == "single" and strategy.world_size != 1:
        yield (
            f"engine single runs one process, and world_size is {strategy.world_size}; use engine fsdp2, deepspeed or "
            "ddp, or set world_size to 1"
        )
    if engine == "ddp" and strategy.world_size == 1:
        yield "engine ddp averages over several processes, and world_size is 1; set it higher, or use engine single"
    if engine == "deepspeed" and strategy.ds_config is None:
        yield "engine deepspeed needs ds_config, DeepSpeed's JSON; set it, or use engine fsdp2"
    if engine != "deepspeed" and strategy.ds_config is not None:
        yield f"ds_config belongs to the engine deepspeed, and engine is {engine}; set it to null"
    if engine != "fsdp2" and (strategy.dp_replicate != 1 or strategy.cpu_offload):
        yield (
            f"dp_replicate and cpu_offload belong to the engine fsdp2, and engine is {engine}"
            + ("; DeepSpeed's offload is in ds_config.zero_optimization" if engine == "deepspeed" else "")
        )
    if strategy.repeated_samples >= max(strategy.places, 1):
        yield (
            f"repeated_samples is {strategy.repeated_samples}, and a step has {strategy.places} places; leave it out: "
            "it follows from global_batch_size"
        )
    if strategy.world_size % strategy.dp_replicate:
        yield f"dp_replicate is {strategy.dp_replicate}, which does not divide world_size {strategy.world_size}"
    if strategy.zero_stage == 3 and strategy.checkpointing == "selective" and strategy.checkpointed_blocks != 0:
        # DeepSpeed adds the bias in place (LinearFunctionForZeroStage3), and a recomputed block adds it again.
        yield (
            "checkpointing selective keeps matrix products, which ZeRO-3 changes in place: gradients would be wrong; "
            "use checkpointing full, or engine fsdp2"
        )


def _optimizer_problems(strategy: Strategy) -> Iterator[str]:
    engine, name = strategy.engine, strategy.optimizer.name
    if engine == "fsdp2" and name in BITSANDBYTES:
        yield (
            f"optimizer.name {name} (bitsandbytes) cannot step FSDP2's sharded DTensors; "
            "use optimizer.name adamw_8bit_ao, or engine deepspeed"
        )
    if engine == "deepspeed" and name in TORCHAO:
        yield (
            f"optimizer.name {name} (torchao) keeps its state in subclasses of tensors, which DeepSpeed's flat "
            "partitions and checkpoints do not take; use optimizer.name adamw_8bit, or engine fsdp2"
        )
    if engine == "deepspeed" and name in PACKAGES:
        yield (
            f"optimizer.name {name} keeps state that all weights share, and DeepSpeed steps groups of them by "
            "turns; use engine fsdp2 or single"
        )
    if engine == "deepspeed" and name == "muon":
        yield (
            "optimizer.name muon multiplies whole matrices, and DeepSpeed gives an optimizer flat partitions; use "
            "engine fsdp2 or single"
        )
    if name == "muon" and strategy.cpu_offload:
        yield (
            "optimizer.name muon multiplies matrices in every step, which with cpu_offload is left to the CPU; set "
            "cpu_offload to false, or use optimizer.name adamw"
        )
    if name == "adamw_schedulefree" and strategy.ema is not None:
        yield "optimizer.name adamw_schedulefree averages the weights itself, and exports its average; set ema to null"
    to_nearest = (*BITSANDBYTES, *PACKAGES, "muon")
    if strategy.precision == "bf16_sr":
        if engine == "deepspeed":
            yield "precision bf16_sr has no master weights, which DeepSpeed's ZeRO keeps; use precision bf16"
        if name in to_nearest:
            yield (
                f"optimizer.name {name} rounds to nearest, and precision bf16_sr needs stochastic rounding; "
                f"use optimizer.name {' or '.join(each for each in OPTIMIZERS if each not in to_nearest)}"
            )
    if strategy.optimizer_in_backward:
        yield from _backward_problems(strategy)


def _backward_problems(strategy: Strategy) -> Iterator[str]:
    """Problems of an optimizer that steps within the backward pass."""
    if strategy.optimizer.name in PACKAGES:
        yield (
            f"optimizer_in_backward steps weights one after the other, and optimizer.name "
            f"{strategy.optimizer.name} needs all gradients at once; set optimizer_in_backward to false"
        )
    if strategy.engine == "ddp":
        yield "optimizer_in_backward steps before engine ddp averages gradients; use engine single or fsdp2"
    if strategy.engine == "deepspeed":
        yield (
            f"optimizer_in_backward: ZeRO-{strategy.zero_stage} partitions gradients before it steps; "
            "use engine single or fsdp2"
        )
    if strategy.grad_accum_steps > 1:
        yield (
            f"optimizer_in_backward steps on every micro-batch, and grad_accum_steps is "
            f"{strategy.grad_accum_steps}; set it to 1"
        )
    if strategy.gradient_clipping is not None:
        yield "optimizer_in_backward steps before the norm of all gradients is known; set gradient_clipping to null"
    if strategy.precision == "fp16":
        yield (
            "optimizer_in_backward steps before an overflow is known, and precision fp16 skips such steps; "
            "use precision bf16"
        )


def _context_problems(strategy: Strategy) -> Iterator[str]:
    cp = strategy.cp
    if strategy.world_size % cp:
        yield f"cp is {cp}, which does not divide world_size {strategy.world_size}"
    if cp % strategy.cp_ring:
        yield f"cp_ring is {strategy.cp_ring}, which does not divide cp {cp}"
    if cp > 1 and strategy.engine == "ddp":
        yield "cp was not tried with engine ddp; use engine fsdp2"


def _compile_problems(strategy: Strategy) -> Iterator[str]:
    if not strategy.compile_blocks:
        return
    if strategy.zero_stage == 3:
        yield "compile_blocks cannot compile ZeRO-3's hooks within blocks; use engine fsdp2, or ZeRO-2"
    if strategy.checkpointing == "selective" and strategy.checkpointed_blocks != 0:
        yield (
            "compile_blocks makes one kernel of several operators, and checkpointing selective keeps the outputs of "
            "single ones; use checkpointing full"
        )
    if strategy.lora is not None and strategy.lora.dora:
        yield "compile_blocks compiles the layers of lora.dora in pieces, slower than it runs them; use LoRA"
    if strategy.lora is not None and strategy.lora.kind != "lora":
        yield f"compile_blocks was not tried with lora.kind {strategy.lora.kind}; leave one of them out"
    if strategy.base == "fp8":
        key = strategy.base_key
        yield f"compile_blocks reads {key} fp8 by kernels that GPUs before Ada lack; use {key} int8"
    if strategy.blocks_to_swap:
        yield "compile_blocks was not tried with blocks_to_swap; leave one of them out"


def _float8_problems(strategy: Strategy) -> Iterator[str]:
    if strategy.float8 == "none":
        return
    if strategy.engine == "deepspeed":
        yield "float8 was not tried with DeepSpeed's flat partitions; use engine single or fsdp2"
    if not strategy.precision.startswith("bf16"):
        yield f"float8 casts weights and activations of bf16, and precision is {strategy.precision}; use precision bf16"
    if strategy.packed:
        yield f"float8 was not tried with {strategy.base_key} {strategy.base}; set it to bf16"
    if strategy.lora is not None and strategy.lora.dora:
        yield "float8 was not tried with lora.dora, which computes with the plain weights; set it to false"
    if strategy.lora is not None and strategy.lora.kind != "lora":
        yield f"float8 was not tried with lora.kind {strategy.lora.kind}; leave one of them out"
    if strategy.blocks_to_swap:
        yield "float8 was not tried with blocks_to_swap; leave one of them out"


def _memory_problems(strategy: Strategy) -> Iterator[str]:
    takes: dict[str, tuple[EngineName, ...]] = {
        "int8": ("single", "ddp", "fsdp2"),
        "fp8": ("single", "ddp", "fsdp2"),
        "nf4": ("single", "ddp"),
    }
    base, key = strategy.base or "bf16", strategy.base_key
    if strategy.engine not in takes.get(base, (strategy.engine,)):
        yield (
            f"{key} {base} keeps packed weights, which {strategy.engine} cannot shard; use {key} bf16, or engine "
            f"{_either(takes[base], strategy.world_size)}"
        )
    if strategy.lora is not None and strategy.lora.base == "bf16" and not strategy.precision.startswith("bf16"):
        yield (
            f"lora.base bf16 computes in bf16, and precision is {strategy.precision}; use precision bf16, or "
            "lora.base int8, fp8 or nf4"
        )
    if strategy.controlnet is not None:
        yield from _controlnet_problems(strategy)
    if strategy.features == "cached" and strategy.encode_chunk is not None:
        yield "encode_chunk belongs to features online, and features is cached"
    if strategy.blocks_to_swap:
        yield from _swap_problems(strategy)


def _controlnet_problems(strategy: Strategy) -> Iterator[str]:
    if strategy.lora is not None:
        yield "lora and controlnet are both set, and a run trains only one; leave the other out"
    if strategy.cp > 1:
        yield f"cp is {strategy.cp}, and a ControlNet does not split a sample; set it to 1"


def _either(engines: Sequence[EngineName], world_size: int) -> str:
    """The engines that can run `world_size` processes."""
    return " or ".join(each for each in engines if each != ("ddp" if world_size == 1 else "single"))


def _swap_problems(strategy: Strategy) -> Iterator[str]:
    swapped, recomputed = strategy.blocks_to_swap, strategy.checkpointed_blocks
    if swapped < LEAST_SWAPPED:
        yield (
            f"blocks_to_swap is {swapped}, and the weights of two blocks are on the device at any time; set it to "
            f"{LEAST_SWAPPED} or more, or to 0"
        )
        return
    if strategy.engine not in ("single", "ddp"):
        yield (
            f"blocks_to_swap keeps whole weights of blocks in CPU memory, and engine is {strategy.engine}, which "
            f"shards them; use engine {_either(('single', 'ddp'), strategy.world_size)}, or set blocks_to_swap to 0"
        )
    if not strategy.frozen and not (strategy.precision == "bf16_sr" and strategy.optimizer_in_backward):
        yield (
            "blocks_to_swap keeps weights in CPU memory, and trained ones must be stepped while they are on the "
            f"device, without masters: precision is {strategy.precision} and optimizer_in_backward is "
            f"{str(strategy.optimizer_in_backward).lower()}; set precision to bf16_sr and optimizer_in_backward to "
            "true, or set lora"
        )
    if strategy.checkpointing != "full":
        yield (
            "blocks_to_swap fetches weights within a block, and checkpointing is selective, which needs the same "
            "operations whenever the block runs; set checkpointing to full"
        )
    if strategy.checkpointed_segments is not None:
        yield (
            "blocks_to_swap has two blocks on the device at any time, each recomputed by itself; leave "
            "checkpointed_segments out"
        )
    if recomputed != "all" and recomputed < swapped:
        yield (
            f"blocks_to_swap is {swapped}, and checkpointed_blocks is {recomputed}: weights of a swapped block come "
            f"again when it is recomputed; set checkpointed_blocks to {swapped} or more, or all"
        )
