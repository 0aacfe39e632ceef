"""How a run says what an option of `bigdit plan` does, which a plan of its YAML does not take: by `--set`."""

from __future__ import annotations

from typing import Any

_KEYS = {
    "global_batch": "train.global_batch_size",
    "micro_batch": "train.micro_batch_size",
    "checkpointed_blocks": "train.checkpointed_blocks",
    "epochs": "train.epochs",
    "precision": "train.precision",
    "lora": "train.lora.rank",
    "optimizer": "optimizer.name",
}
"""Options whose values are those of a key."""

_OTHERS = {
    "resolution": "data.buckets=[[HEIGHT,WIDTH]]",
    "buckets": "data.buckets=[[HEIGHT,WIDTH],…]",
    "frames": "data.buckets=[[FRAMES,HEIGHT,WIDTH]]",
    "full": "train.lora=null",
    "from_scratch": "model.init_from=null",
}
"""Options by what says the same."""


def instead(option: str, value: Any) -> str:
    """What is said of an option that was given beside `--config`, with the way there is."""
    called = f"--{option.replace('_', '-')}"
    if option == "model":
        return f"--model {value} and --config each say what is planned; leave one of them out"
    return f"{called} goes with --model; with --config it is --set {_said(option, value)}"


def _said(option: str, value: Any) -> str:
    if option == "engine":
        return _engine(value)
    if option == "features":
        return f"data.features={'online' if value == 'online' else 'FOLDER'}"
    if option == "ema":
        return {"none": "train.ema=null", "auto": "train.ema={}"}.get(value, f"train.ema.device={value}")
    if option == "ema_widths":
        return f"train.ema.widths=[{value}]"
    return _OTHERS.get(option) or f"{_KEYS[option]}={value}"


def _engine(preset: str) -> str:
    name, _, offload = preset.partition("-")
    if name.startswith("zero"):
        return "engine.name=deepspeed, and --set engine.ds_config=FILE with its stage"
    return f"engine.name={name}{' --set engine.cpu_offload=true' if offload else ''}"
