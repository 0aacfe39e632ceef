"""Check that options of `accelerate launch` agree with the run.

They reach processes as environment variables for accelerate's own Accelerator, which bigdit does not use. A run that
ignored them would train otherwise than asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from bigdit.checkout import entry
from bigdit.config.load import read_ds_config
from bigdit.config.wrong import wrong
from bigdit.dist import ACCELERATE, asked_of_accelerate
from bigdit.documents import differences, written
from bigdit.errors import UserError
from bigdit.strategy import Strategy

_ENGINES = {"use_deepspeed": "deepspeed", "use_fsdp": "fsdp2", "use_megatron_lm": "megatron"}
_STARTED = {
    "ddp": "use --multi_gpu",
    "deepspeed": "use --use_deepspeed",
    "fsdp2": "use --use_fsdp --fsdp_version 2, or --multi_gpu",
}
_PRECISIONS = {"fp32": "no", "tf32": "no", "bf16": "bf16", "bf16_sr": "bf16", "fp16": "fp16"}


def _started(engine: str) -> str:
    """How to start a run of this engine."""
    return f"start it by `python {' '.join(entry())}`" if engine == "single" else _STARTED[engine]


def check_accelerate(strategy: Strategy) -> None:
    """Raise UserError with each option of accelerate's launcher that contradicts `strategy`."""
    asked = asked_of_accelerate()
    problems = [
        _problem(asked, option, f"strategy.engine is {strategy.engine}", _started(strategy.engine))
        for option, engine in _ENGINES.items()
        if option in asked and engine != strategy.engine
    ]
    if problems := problems or [*_option_problems(asked, strategy), *_file_problems(asked, strategy)]:
        raise UserError(*problems)


def _option_problems(asked: dict[str, str], strategy: Strategy) -> Iterator[str]:
    for option, (wanted, decided) in _decided(strategy).items():
        if option in asked and _plain(asked[option]) != _plain(wanted):
            yield _problem(asked, option, decided, f"use --{option} {_plain(wanted)}")


def _decided(strategy: Strategy) -> dict[str, tuple[object, str]]:
    """The value of each accelerate option for this strategy, and the key that decides it."""
    accum, clipping, replicas = strategy.grad_accum_steps, strategy.gradient_clipping, strategy.dp_replicate
    found: dict[str, tuple[object, str]] = {
        "mixed_precision": (_PRECISIONS[strategy.precision], f"strategy.precision is {strategy.precision}"),
        "dynamo_backend": (
            "inductor" if strategy.compile_blocks else "no",
            f"strategy.compile_blocks is {written(strategy.compile_blocks)}",
        ),
        "gradient_accumulation_steps": (accum, f"strategy.grad_accum_steps is {accum}"),
        "gradient_clipping": (clipping or 0, f"strategy.gradient_clipping is {written(clipping)}"),
        "parallelism_config_dp_replicate_size": (replicas, f"strategy.dp_replicate is {replicas}"),
        "parallelism_config_cp_size": (strategy.cp, f"strategy.cp is {strategy.cp}"),
        **{f"parallelism_config_{way}_size": (1, "strategy.cp splits samples") for way in ("tp", "sp")},
    }
    if strategy.ds_config is not None:
        zero, of = strategy.ds_config.get("zero_optimization", {}), "strategy.ds_config: zero_optimization"
        found["zero_stage"] = (strategy.zero_stage, f"{of}.stage is {strategy.zero_stage}")
        for part in ("offload_optimizer", "offload_param"):
            device = (zero.get(part) or {}).get("device", "none")
            found[f"{part}_device"] = (device, f"{of}.{part}.device is {device}")
    if strategy.engine == "fsdp2":
        offload, reshard, blocks = strategy.cpu_offload, strategy.reshard_after_forward, strategy.checkpointed_blocks
        found |= {
            "fsdp_version": (2, "strategy.engine is fsdp2"),
            "fsdp_offload_params": (offload, f"strategy.cpu_offload is {written(offload)}"),
            "fsdp_reshard_after_forward": (reshard, f"strategy.reshard_after_forward is {written(reshard)}"),
            "fsdp_activation_checkpointing": (blocks != 0, f"strategy.checkpointed_blocks is {blocks}"),
        }
    return found


def _file_problems(asked: dict[str, str], strategy: Strategy) -> Iterator[str]:
    option, path = "deepspeed_config_file", asked.get("deepspeed_config_file")
    if path is None or strategy.ds_config is None:
        return
    document = dict(strategy) | {"ds_config": read_ds_config(Path(path), f"--{option}")}
    try:
        found = Strategy.model_validate(document).ds_config
    except ValidationError as error:
        yield from (f"--{option} {path}: {line}" for line in wrong(error, document, Strategy))
        return
    for key, own, wanted in differences(found, strategy.ds_config):
        decided = f"{key} in it is {written(own)}, and in strategy.ds_config {written(wanted)}"
        yield _problem(asked, option, decided, f"leave --{option} out")


def _problem(asked: dict[str, str], option: str, decided: str, fix: str) -> str:
    value = "" if option in _ENGINES else f" {asked[option]}"
    return f"accelerate was asked for --{option}{value} ({ACCELERATE[option][0]}), and {decided}; {fix}"


def _plain(value: object) -> str:
    """`1` of 1, 1.0 and "1.0"; `true` of True."""
    text = str(value).lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text
