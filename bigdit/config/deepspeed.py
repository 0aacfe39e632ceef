"""DeepSpeed's JSON and the run's YAML in one: what both could say is said once, and filled into the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bigdit.config.deepspeed_keys import wrong_keys
from bigdit.documents import parse_json, read_mapping
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
