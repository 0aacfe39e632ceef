"""The keys of DeepSpeed's document, and what each may hold: what DeepSpeed itself would read, or refuse hours later.

Kept here, since importing deepspeed takes seconds; a test holds them against the installed one. Source: DeepSpeed
0.19, runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py and runtime/precision_config.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bigdit.config.wrong import wrong
from bigdit.numbers import NotNegative, Number, Positive, Switch, no_truth_value

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
