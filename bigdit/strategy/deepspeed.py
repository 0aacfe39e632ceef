"""DeepSpeed's document in a strategy: `ds_config` holds what the strategy's other keys do not set."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from bigdit.errors import nearest

Document = dict[str, Any]
Values = dict[str, tuple[Any, str]]
"""By key of the document: the value that a strategy sets, and the strategy's key for it."""

# DeepSpeed ignores unknown top-level keys. In sections it rejects them itself.
# Source: deepspeed/runtime/config.py, DeepSpeed 0.19.
_TOP_LEVEL = """
activation_checkpointing aio amp autotuning bf16 checkpoint comet comms_logger communication_data_type compile
csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc
dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown optimizer pipeline
prescale_gradients scheduler seq_parallel_communication_data_type steps_per_print tensor_parallel tensorboard timers
torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size
wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
zero_optimization
"""

# Sections that a run's own keys replace. DeepSpeed would build a second optimizer or schedule.
_OWNED = {
    "optimizer": "strategy.optimizer",
    "scheduler": "train.lr_schedule",
    "data_types": "strategy.precision",
    "amp": "strategy.precision",
    "torch_autocast": "strategy.precision",
    "activation_checkpointing": "strategy.checkpointed_blocks",
}

_QUANTISER = "runs DeepSpeed's own CUDA kernels, whose memory an emulated GPU cannot count"
_NODES = "shards within a node, and plans know processes, not nodes"
# Neither a plan nor a run here supports these. The first value is the one that turns them off.
_REFUSED = {
    "zero_quantized_weights": (False, _QUANTISER),
    "zero_quantized_nontrainable_weights": (False, _QUANTISER),
    "zero_quantized_gradients": (False, _QUANTISER),
    "zero_hpz_partition_size": (1, _NODES),
    "zenflow": (None, "steps the optimizer outside the training step"),
    "compute_grad_norm": (True, "hides gradients that are not finite, and fp32 would train on them"),
}
# Sections that a precision turns on, and their keys that would replace the run's optimizer by DeepSpeedCPUAdam.
PRECISIONS = {
    "bf16": ("bf16_master_weights_and_grads", "bf16_optimizer_states"),
    "fp16": ("fp16_master_weights_and_grads",),
}


def complete(document: Document, values: Values) -> Document:
    """The document for DeepSpeed: ds_config with all that the strategy sets."""
    whole = copy.deepcopy(document)  # DeepSpeed writes into it
    for key, (value, _) in values.items():
        whole[key] = whole.get(key, {}) | {"enabled": value} if key in PRECISIONS else value
    return whole


def without_auto(value: Any) -> Any:
    """The document without values `auto`, which mean no value, as in DeepSpeed."""
    if not isinstance(value, dict):
        return value
    return {key: without_auto(inner) for key, inner in value.items() if inner != "auto"}


def split(document: Document, values: Values) -> tuple[Document, list[str]]:
    """ds_config without the strategy's values, and a line for each problem."""
    document = without_auto(document)
    known = _TOP_LEVEL.split()
    problems = [f"ds_config.{key}: unknown key; {nearest(key, known)}" for key in document if key not in known]
    problems += [
        f"ds_config.{name} is {value!r}, and a mapping was expected"
        for name in ("zero_optimization", *PRECISIONS, "compile")
        if not isinstance(value := document.get(name, {}), dict)
    ]
    zero = document.get("zero_optimization", {})
    if not problems:
        problems += [
            f"ds_config.zero_optimization.{name} is {value!r}, and a mapping was expected"
            for name in ("offload_optimizer", "offload_param")
            if not isinstance(value := zero.get(name) or {}, dict)
        ]
    if problems:
        return document, sorted(problems)
    problems += [
        f"ds_config.{section}: {key} of the run sets this; remove it from ds_config"
        for section, key in _OWNED.items()
        if section in document
    ]
    problems += _strip(document, values)
    problems += [
        f"ds_config.{section}.{key} needs DeepSpeedCPUAdam, and bigdit steps its own optimizer; remove it"
        for section, keys in PRECISIONS.items()
        for key in keys
        if document.get(section, {}).get(key)
    ]
    if document.get("bf16", {}).get("check_grad_overflow", True) is not True:
        problems.append(
            "ds_config.bf16.check_grad_overflow is off: gradients that are not finite are stepped; remove it"
        )
    if document.get("compile", {}).get("deepcompile"):
        problems.append("ds_config.compile.deepcompile is set: engines are never compiled by DeepSpeed here; remove it")
    return document, [*problems, *_zero_problems(zero)]


def _strip(document: Document, values: Values) -> list[str]:
    """Remove the strategy's own values from the document; a line for each that differs."""
    problems = []
    for key, (value, ours) in values.items():
        # The strategy turns bf16 and fp16 on. The document sets how losses are scaled.
        name, section = (f"{key}.enabled", document.get(key, {})) if key in PRECISIONS else (key, document)
        found = section.pop(name.rpartition(".")[2], value)
        if found != value:
            problems.append(f'ds_config.{name} is {found!r}, and {ours} makes it {value!r}; use "auto"')
        if key in PRECISIONS and not section:
            document.pop(key, None)
    if "train_batch_size" in document:
        problems.append('ds_config.train_batch_size: it follows from micro_batch_size; use "auto"')
    return problems


def _zero_problems(zero: Document) -> Iterator[str]:
    name, stage = "ds_config.zero_optimization", zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield f"{name}.stage is {stage!r}; it is 0, 1, 2 or 3"
        return
    for key, (off, reason) in _REFUSED.items():
        if zero.get(key, off) != off:
            yield f"{name}.{key} is {zero[key]!r}: it {reason}; remove it"
    size = zero.get("allgather_bucket_size", 2)
    if isinstance(size, int) and size % 2:
        yield f"{name}.allgather_bucket_size is {size}: DeepSpeed aligns by 2; nearest: {size + 1}"
    for section, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        yield from _offload_problems(zero.get(section) or {}, f"{name}.{section}", stage, lowest)


def _offload_problems(offload: Document, name: str, stage: int, lowest: int) -> Iterator[str]:
    device = offload.get("device", "none")
    if device == "nvme":
        yield (
            f"{name}.device is 'nvme': it needs DeepSpeed's asynchronous I/O, compiled with libaio, and a disk "
            "whose speed no plan knows; use 'cpu'"
        )
    elif device not in ("cpu", "none"):
        yield f"{name}.device is {device!r}; it is 'cpu' or 'none'"
    if device != "cpu":
        return
    if stage < lowest:
        yield f"{name} needs zero_optimization.stage {lowest} or above, and it is {stage}"
    if offload.get("ratio", 1.0) != 1.0:
        yield f"{name}.ratio is {offload['ratio']!r}: a part on each device needs DeepSpeedCPUAdam; use 1.0"
    if offload.get("super_offload"):
        yield f"{name}.super_offload needs DeepSpeedCPUAdam in a process of its own; remove it"
