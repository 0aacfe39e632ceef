"""DeepSpeed's JSON and the run's YAML in one: what both could say is said once, and filled into the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bigdit.config.wrong import wrong
from bigdit.documents import parse_json, read_mapping
from bigdit.numbers import NotNegative, Number, Positive, Switch, no_truth_value
from bigdit.spec import Strategy

Values = dict[str, tuple[Any, str]]
"""Top-level keys of the document, their values, and the key of ours that decides each."""

# Sections that bigdit's own config owns. DeepSpeed would build a second optimizer or schedule beside ours.
_OWNED = {
    "optimizer": "optimizer",
    "scheduler": "train.lr_schedule",
    "data_types": "train.precision",
    "amp": "train.precision",
    "torch_autocast": "train.precision",
    "activation_checkpointing": "train.checkpointed_blocks",
}

# Our optimizers are torch's and bitsandbytes'; DeepSpeed's list of tested ones knows only some by class, and with
# offload it wants its DeepSpeedCPUAdam, which compiles for a minute. torch's fused AdamW steps on the host as well.
_OUR_OPTIMIZERS = {
    "zero_allow_untested_optimizer": (True, "optimizer"),
    "zero_force_ds_cpu_optimizer": (False, "optimizer"),
}

_QUANTISER = "runs CUDA kernels of DeepSpeed's own, whose memory no emulated GPU sees"
_NODES = "shards within a node, and an attempt knows processes, not nodes"
# What neither a plan nor this machine can stand for. Off is what they are by default.
_REFUSED = {
    "zero_quantized_weights": (False, _QUANTISER),
    "zero_quantized_nontrainable_weights": (False, _QUANTISER),
    "zero_quantized_gradients": (False, _QUANTISER),
    "zero_hpz_partition_size": (1, _NODES),
    "zenflow": (None, "steps the optimizer beside the training step, and not within it"),
    "compute_grad_norm": (True, "hides gradients that are not finite, and fp32 would train on them"),
}
# Sections that a precision turns on, and what in them would put DeepSpeedCPUAdam in place of the run's optimizer.
_PRECISIONS = {
    "bf16": ("bf16_master_weights_and_grads", "bf16_optimizer_states"),
    "fp16": ("fp16_master_weights_and_grads",),
}


def read_ds_config(path: Path, key: str = "engine.ds_config") -> dict[str, Any]:
    """The document as it stands, which `key` names. Raises UserError where it is missing or not a JSON object."""
    return read_mapping(path, parse_json, f"{key}: {path}", "a JSON object")


def ds_values(strategy: Strategy, section: str = "") -> Values:
    """What a strategy says that the document says too; `section` comes before the names of its keys."""
    return {
        "train_micro_batch_size_per_gpu": (strategy.micro_batch_size, f"{section}micro_batch_size"),
        "gradient_accumulation_steps": (strategy.grad_accum_steps, f"{section}grad_accum_steps"),
        "gradient_clipping": (strategy.gradient_clipping or 0.0, f"{section}gradient_clipping"),
        **{name: (strategy.precision == name, f"{section}precision") for name in _PRECISIONS},
    }


def complete_ds_config(document: dict[str, Any], ours: Values) -> tuple[dict[str, Any], list[str]]:
    """Fill in `ours` (missing or "auto" in the document); a different value is a problem, named.

    Returns the complete document and the problems, a line each.
    """
    if unknown := wrong_keys(document):
        return document, unknown
    complete = dict(document)
    problems = [
        f"ds_config.{section}: bigdit sets this with {key} in the run's config; remove it from the JSON"
        for section, key in _OWNED.items()
        if section in document
    ]
    for key, (value, our_key) in (ours | _OUR_OPTIMIZERS).items():
        # Of bf16 and fp16 we say whether they are on; how losses are scaled is the document's.
        name, section = (f"{key}.enabled", _section(document, key)) if key in _PRECISIONS else (key, document)
        found = section.get(name.rpartition(".")[2], "auto")
        if found not in ("auto", value):
            problems.append(f'ds_config.{name} is {found!r}, and {our_key} makes it {value!r}; use "auto"')
        complete[key] = section | {"enabled": value} if key in _PRECISIONS else value
    problems += [
        f"ds_config.{section}.{key} needs DeepSpeedCPUAdam, and bigdit steps its own optimizer; remove it"
        for section, keys in _PRECISIONS.items()
        for key in keys
        if _section(document, section).get(key)
    ]
    if _section(document, "bf16").get("check_grad_overflow", True) is not True:
        problems.append(
            "ds_config.bf16.check_grad_overflow is off: gradients that are not finite are stepped; remove it"
        )
    problems += _zero_problems(document.get("zero_optimization", {}))
    if _section(document, "compile").get("deepcompile"):
        problems.append("ds_config.compile.deepcompile is set: engines are never compiled by DeepSpeed here; remove it")
    # Any number is refused where train_batch_size disagrees with the three that it is the product of.
    if complete.pop("train_batch_size", "auto") != "auto":
        problems.append('ds_config.train_batch_size: it follows from train.micro_batch_size; use "auto"')
    return complete, problems


def _section(document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name, "auto")
    return {} if found == "auto" else dict(found)


def _zero_problems(zero: dict[str, Any]) -> list[str]:
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        return [f"ds_config.zero_optimization.stage is {stage!r}; it is 0, 1, 2 or 3"]
    problems = [
        f"ds_config.zero_optimization.{key} is {zero[key]!r}: it {reason}; remove it"
        for key, (off, reason) in _REFUSED.items()
        if zero.get(key, off) not in (off, "auto")
    ]
    size = zero.get("allgather_bucket_size", 2)
    if isinstance(size, int) and size % 2:
        problems.append(
            f"ds_config.zero_optimization.allgather_bucket_size is {size}: DeepSpeed aligns by 2; nearest: {size + 1}"
        )
    for section, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        problems += _offload_problems(zero.get(section) or {}, section, stage, lowest)
    return problems


def _offload_problems(offload: dict[str, Any], section: str, stage: int, lowest: int) -> list[str]:
    name, device = f"ds_config.zero_optimization.{section}", offload.get("device", "none")
    if device == "none":
        return []
    if device == "nvme":
        return [
            f"{name}.device is 'nvme': it needs DeepSpeed's asynchronous I/O, compiled with libaio, and a disk "
            "whose speed no plan knows; use 'cpu'"
        ]
    if device != "cpu":
        return [f"{name}.device is {device!r}; it is 'cpu' or 'none'"]
    problems = []
    if stage < lowest:
        problems.append(f"{name} needs zero_optimization.stage {lowest} or above, and it is {stage}")
    if offload.get("ratio", 1.0) != 1.0:
        problems.append(f"{name}.ratio is {offload['ratio']!r}: a part on each device needs DeepSpeedCPUAdam; use 1.0")
    if offload.get("super_offload"):
        problems.append(f"{name}.super_offload needs DeepSpeedCPUAdam in a process of its own; remove it")
    return problems


Size = Annotated[int, BeforeValidator(no_truth_value), Field(ge=0)]
"""`5e8` is one too."""
Whole = Annotated[int, BeforeValidator(no_truth_value)]
Section = dict[str, Any]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Offload(_Keys):
    device: Any = None
    nvme_path: str | None = None
    buffer_count: Size = 4
    pin_memory: Switch = True


class OffloadOptimizer(Offload):
    pipeline_read: Switch = False
    pipeline_write: Switch = False
    fast_init: Switch = False
    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    super_offload: Switch = False
    cpuadam_cores_perc: Annotated[Number, Field(ge=0, le=1)] = 0.8


class OffloadParam(Offload):
    buffer_size: Size = 0
    max_in_cpu: Size = 0


class Zero(_Keys):
    stage: Any = 0
    contiguous_gradients: Switch = True
    reduce_scatter: Switch = True
    reduce_bucket_size: Annotated[Size, Field(ge=1)] = 1
    use_multi_rank_bucket_allreduce: Switch = True
    allgather_partitions: Switch = True
    allgather_bucket_size: Size = 0
    overlap_comm: Switch | None = None
    compute_grad_norm: Switch = True
    load_from_fp32_weights: Switch = True
    elastic_checkpoint: Switch = False
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    zenflow: Section | None = None
    sub_group_size: Size = 0
    cpu_offload_param: Switch | None = None
    cpu_offload_use_pin_memory: Switch | None = None
    cpu_offload: Switch | None = None
    prefetch_bucket_size: Size = 0
    stage3_prefetch_bucket_size: Size = 0
    param_persistence_threshold: Size = 0
    stage3_param_persistence_threshold: Size = 0
    model_persistence_threshold: Size = 0
    stage3_model_persistence_threshold: Size = 0
    max_live_parameters: Size = 0
    stage3_max_live_parameters: Size = 0
    max_reuse_distance: Size = 0
    stage3_max_reuse_distance: Size = 0
    gather_16bit_weights_on_model_save: Switch = False
    stage3_gather_16bit_weights_on_model_save: Switch = False
    module_granularity_threshold: Whole = 0
    stage3_module_granularity_threshold: Whole = 0
    use_all_reduce_for_fetch_params: Switch = False
    stage3_use_all_reduce_for_fetch_params: Switch = False
    allgather_sequential: Switch = False
    stage3_allgather_sequential: Switch = False
    stage3_gather_fp16_weights_on_model_save: Switch = False
    ignore_unused_parameters: Switch = True
    legacy_stage1: Switch = False
    round_robin_gradients: Switch = False
    parameter_alignment: Switch = False
    zero_hpz_partition_size: Size = 1
    zero_quantized_weights: Switch = False
    zero_quantized_nontrainable_weights: Switch = False
    zero_quantized_gradients: Switch = False
    memory_efficient_linear: Switch = True
    pipeline_loading_checkpoint: Switch = False
    override_module_apply: Switch = True
    log_trace_cache_warnings: Switch = False
    enable_sanity_checks: Switch = False
    save_muon_momentum_buffer_in_memory: Switch = False
    leaf_module: Section | None = None


class Fp16(_Keys):
    enabled: Switch = False
    auto_cast: Switch = False
    loss_scale: NotNegative = 0.0
    initial_scale_power: Annotated[Whole, Field(ge=0, le=127)] = 16  # of two, in fp32
    loss_scale_window: Annotated[Whole, Field(ge=1)] = 1000
    hysteresis: Annotated[Whole, Field(ge=1)] = 2
    consecutive_hysteresis: Switch = False
    min_loss_scale: Size = 1
    fp16_master_weights_and_grads: Switch = False


class Bf16(_Keys):
    enabled: Switch = False
    immediate_grad_update: Switch = False
    check_grad_overflow: Switch = True
    bf16_master_weights_and_grads: Switch = False
    bf16_optimizer_states: Switch = False


class Document(_Keys):
    """The document as a whole; what sections without a class hold is for DeepSpeed to say."""

    train_batch_size: Size | None = None
    train_micro_batch_size_per_gpu: Size | None = None
    gradient_accumulation_steps: Size | None = None
    managed_gradient_accumulation: Switch = True
    gradient_clipping: NotNegative = 0.0
    gradient_predivide_factor: Positive = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    prescale_gradients: Switch = False
    steps_per_print: Annotated[Size, Field(ge=1)] | None = None
    wall_clock_breakdown: Switch = False
    memory_breakdown: Switch = False
    dump_state: Switch = False
    disable_python_gc: Switch = False
    disable_allgather: Switch = False
    dataloader_drop_last: Switch = False
    communication_data_type: str | None = None
    seq_parallel_communication_data_type: str | None = None
    zero_allow_untested_optimizer: Switch = False
    zero_force_ds_cpu_optimizer: Switch = True
    use_data_before_expert_parallelism: Switch = False
    vocabulary_size: Size | None = None
    log_level: str | None = None
    zero_optimization: Zero = Zero()
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    optimizer: Any = None
    scheduler: Any = None
    amp: Any = None
    torch_autocast: Any = None
    data_types: Any = None
    activation_checkpointing: Any = None
    aio: Section = {}
    autotuning: Section = {}
    checkpoint: Section = {}
    comet: Section = {}
    comms_logger: Section = {}
    compile: Section = {}
    csv_monitor: Section = {}
    data_efficiency: Section = {}
    datastates_ckpt: Section = {}
    expert_parallel: Section = {}
    flops_profiler: Section = {}
    hybrid_engine: Section = {}
    pipeline: Section = {}
    tensor_parallel: Section = {}
    tensorboard: Section = {}
    timers: Section = {}
    wandb: Section = {}
    weight_quantization: Section = {}


def wrong_keys(document: dict[str, Any]) -> list[str]:
    """A line for each key that DeepSpeed does not know, or that has a value which it does not take."""
    said = _without_auto(document)
    try:
        Document.model_validate(said)
    except ValidationError as error:
        return [f"ds_config.{line}" for line in wrong(error, said, Document)]
    return []


def _without_auto(value: Any) -> Any:
    """`auto` stands for no value wherever it stands, as DeepSpeed's own sections have it."""
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(inner) for key, inner in value.items() if inner != "auto"}
