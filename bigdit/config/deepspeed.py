"""DeepSpeed's JSON and the run's YAML in one: what both could say is said once, and filled into the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bigdit.errors import UserError

# Sections that bigdit's own config owns. DeepSpeed would build a second optimizer or schedule beside ours.
_OWNED = {"optimizer": "optimizer", "scheduler": "train.lr_schedule", "data_types": "train.precision"}


def read_ds_config(path: Path) -> dict[str, Any]:
    """The document as it stands. Raises UserError where it is missing or not a JSON object."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"engine.ds_config: {path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"engine.ds_config: {path} is not a JSON document: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"engine.ds_config: {path} should hold a JSON object")
    return document


def complete_ds_config(document: dict[str, Any], ours: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fill the keys that the run decides (missing or "auto"); a different value is a problem, named.

    `ours`: train_micro_batch_size_per_gpu, gradient_accumulation_steps, gradient_clipping, bf16. Returns the
    complete document and the problems, a line each.
    """
    complete = dict(document)
    problems = [
        f"ds_config.{section}: bigdit sets this with {key} in the run's config; remove it from the JSON"
        for section, key in _OWNED.items()
        if section in document
    ]
    if document.get("fp16", {}).get("enabled"):
        problems.append("ds_config.fp16.enabled is true; bigdit trains in bf16 or fp32 (train.precision)")
    for key, (value, run_key) in ours.items():
        found = document.get(key, "auto")
        if found not in ("auto", value):
            problems.append(f'ds_config.{key} is {found!r}, and {run_key} makes it {value!r}; use "auto"')
        complete[key] = value
    zero = document.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        problems.append(f"ds_config.zero_optimization.stage is {stage!r}; it is 0, 1, 2 or 3")
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device", "none") != "none":
            problems.append(
                f"ds_config.zero_optimization.{section} needs DeepSpeed's own CPU optimizer, which is not among "
                "optimizer.name yet; remove it"
            )
    # Our optimizers are torch's and bitsandbytes'; DeepSpeed's list of tested ones knows only some by class.
    complete.setdefault("zero_allow_untested_optimizer", True)
    # Any number is refused where train_batch_size disagrees with the three that it is the product of.
    if complete.pop("train_batch_size", "auto") != "auto":
        problems.append('ds_config.train_batch_size: it follows from train.micro_batch_size; use "auto"')
    return complete, problems
