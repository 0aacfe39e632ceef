"""Turns a run.yaml into requests for plans, one for each stage. What the run says is fixed; the rest is searched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigdit.config.check import online_problems
from bigdit.config.data import IdentityCodec, frames_of
from bigdit.config.load import parse_run, read_run
from bigdit.config.run import RunConfig
from bigdit.config.stages import of_each, read_stages, with_set
from bigdit.config.strategy_text import PRESETS
from bigdit.documents import at, differences, written
from bigdit.encoders.host_bytes import host_weights
from bigdit.errors import UserError
from bigdit.search.plan import ResolvedRequest
from bigdit.search.request import OPTIONS, option
from bigdit.search.resolve import resolve_request
from bigdit.strategy import Strategy

_KEYS = {name: key for name, known in OPTIONS.items() if (key := known["key"] or "").startswith("strategy.")}
"""Options with keys of a strategy."""
# Keys of a strategy that a plan takes from the run, or does not depend on.
_TAKEN = (
    *(key.removeprefix("strategy.") for key in _KEYS.values()),
    *("world_size", "grad_accum_steps", "checkpointed_segments", "lora", "cpu_offload", "ds_config"),
    *("gradient_clipping", "optimizer.lr", "optimizer.betas", "optimizer.beta3", "optimizer.eps"),
    *("optimizer.weight_decay", "optimizer.decayed", "encode_chunk", "read_ahead_steps"),
)


Document = dict[str, Any]


def requests_of(path: Path, overrides: Sequence[str], asked: Mapping[str, Any]) -> list[ResolvedRequest]:
    """A request for each stage of the run in `path`; one if it has no stages. `asked` adds what the YAML does not say,
    as arguments of `resolve_request`. Raises UserError with all problems."""
    documents, stages = read_stages(path, overrides)

    def one(number: int) -> ResolvedRequest:
        try:
            return _request(documents[number], asked)
        except UserError as error:
            raise UserError(*(by_key(problem) for problem in error.problems)) from None

    try:
        return of_each(range(len(documents)), one)
    except UserError as error:
        raise UserError(
            *(with_set(f"{path}: {problem}", path, overrides, stages) for problem in error.problems)
        ) from None


def overruled(path: Path, overrides: Sequence[str]) -> list[str]:
    """A line for each key of the run that changes memory or speed, and that its plan chooses instead."""
    documents, _ = read_stages(path, overrides)
    lines = set()
    for document in documents:
        strategy = parse_run(_for_plan(document)).strategy
        for key, found, _ in differences(strategy.model_dump(mode="json"), Strategy().model_dump(mode="json")):
            if found is not None and not any(f"{key}.".startswith(f"{taken}.") for taken in _TAKEN):
                lines.add(f"strategy.{key} is {written(found)}, and the plan chooses its own value")
    return [f"{path}: {line}" for line in sorted(lines)]


def _for_plan(document: dict[str, Any]) -> dict[str, Any]:
    """The document without keys that the plan chooses: the global batch, and the GPUs if no engine is fixed."""
    strategy = document.get("strategy", {})
    if not isinstance(strategy, dict):
        return document
    judged = {"global_batch_size", "repeated_samples"} | ({"world_size"} if "engine" not in strategy else set())
    kept = {key: value for key, value in strategy.items() if key not in judged}
    if kept.get("engine") == "deepspeed":
        kept.setdefault("ds_config", {})
    return document | {"strategy": kept}


def _request(document: dict[str, Any], asked: Mapping[str, Any]) -> ResolvedRequest:
    run = parse_run(_for_plan(document))
    if problems := online_problems(run):
        raise UserError(*problems)

    def given(key: str, value: Any) -> Any:
        return None if at(document, key.split(".")) is None else value

    strategy, gpus, whole = run.strategy, at(document, ["strategy", "world_size"]), run.model_dump()
    if None not in (gpus, asked.get("gpus")) and gpus != asked["gpus"]:
        raise UserError(f"strategy.world_size is {gpus}, and --gpus {asked['gpus']}; leave one of them out")
    gpus = gpus or asked.get("gpus")
    largest, *_ = buckets = sorted(run.data.all_buckets, key=math.prod, reverse=True)
    batch, segments = _global_batch(strategy, document, gpus or 1), strategy.checkpointed_segments
    blocks = given(f"strategy.checkpointed_{'segments' if segments else 'blocks'}", strategy.checkpointed_blocks)
    fixed = {name: given(key, at(whole, key.split("."))) for name, key in _KEYS.items()} | {
        "model": _model(run),
        "resolution": list(dict.fromkeys((bucket[-2], bucket[-1]) for bucket in buckets)),
        "buckets": "none",
        "frames": frames_of(largest) if len(largest) == 3 else None,
        "global_batch": batch,
        "engine": given("strategy.engine", _engine(strategy)),
        "checkpointed_blocks": blocks,
        "ema": None if strategy.ema is None else strategy.ema.device,
        "ema_widths": None if strategy.ema is None else strategy.ema.widths,
        "lora": strategy.lora and strategy.lora.model_dump(exclude={"base"}),
        "lora_base": given(f"strategy.{strategy.base_key}", strategy.base),
        "lora_text_encoders": None,  # in lora
        "controlnet": strategy.controlnet and strategy.controlnet.model_dump(exclude={"base"}),
        "fp8": None if strategy.float8 == "none" else strategy.float8,
        "full": not strategy.frozen,
    }
    request = resolve_request(**fixed | {**asked, "gpus": gpus})
    validated = 0 if run.validation is None else run.validation.samples
    update: dict[str, Any] = {
        "constraints": request.constraints.model_copy(update={"checkpointed_segments": segments}),
        "model": request.model.model_copy(
            update={"references": run.data.references, "first_frame": run.encoders.first_frame is not None}
        ),
        "validated": validated,
        "samples": run.samples and host_weights(run.encoders),
    }
    if request.images is not None and request.images <= validated:
        raise UserError(f"validation.samples is {validated}, and --images {request.images} leaves none to train on")
    if run.train.epochs is not None:
        update["epochs"] = run.train.epochs
    elif request.images is not None and batch is not None:
        update["epochs"] = run.train.known_steps * batch / (request.images - validated)
    return request.model_copy(update=update)


def _model(run: RunConfig) -> str:
    if (name := run.model.name or run.model.path) is None:
        raise UserError("model.class_name says what is trained; plans take model.name or model.path, a config.json")
    if isinstance(run.encoders.image, IdentityCodec):
        raise UserError("encoders.image is identity, and plans need a VAE's latents; `bigdit train` measures this run")
    return str(name)


def _global_batch(strategy: Strategy, document: dict[str, Any], gpus: int) -> Any:
    whole, accum, size = (
        at(document, ["strategy", key]) for key in ("global_batch_size", "grad_accum_steps", "micro_batch_size")
    )
    if whole is not None or None in (accum, size):
        return whole
    repeated = at(document, ["strategy", "repeated_samples"]) or 0
    return strategy.micro_batch_size * strategy.grad_accum_steps * gpus // strategy.cp - repeated


def _engine(strategy: Strategy) -> str:
    if strategy.engine != "deepspeed":
        return f"{strategy.engine}{'-offload' if strategy.cpu_offload else ''}"
    zero = (strategy.ds_config or {}).get("zero_optimization", {})
    moved = [part for part in ("optimizer", "param") if (zero.get(f"offload_{part}") or {}).get("device") == "cpu"]
    name = f"zero{zero.get('stage', 0)}{'-offload' if moved else ''}{'-all' if 'param' in moved else ''}"
    if name not in PRESETS:
        raise UserError(f"strategy.ds_config is {name}, which is not planned; leave it out")
    return name


def by_key(problem: str) -> str:
    """The problem with keys of the run instead of options."""
    problem = problem.replace("--gpus is", "strategy.world_size is").replace("use --gpus 1", "set it to 1")
    for name in sorted(OPTIONS, key=len, reverse=True):  # `lora_base` before `lora`
        if key := OPTIONS[name]["key"]:
            problem = problem.replace(option(name), key)
    return problem


def carried(document: Any, planned: Strategy) -> Strategy:
    """The planned strategy with the run's constants for optimizer, EMA, adapters and clipping. Raises UserError if the
    document is no valid run."""
    if not isinstance(document, dict):
        raise UserError("a run.yaml is a mapping of sections, and this document is none")
    own = parse_run(_for_plan(document)).strategy
    kept = planned.optimizer.model_dump(include={"name", "implementation"})
    update: dict[str, Any] = {
        "optimizer": own.optimizer.model_copy(update=kept),
        "gradient_clipping": planned.gradient_clipping and own.gradient_clipping,
    }
    if planned.ema is not None and own.ema is not None and own.ema.count == planned.ema.count:
        update["ema"] = own.ema.model_copy(update={"device": planned.ema.device})
    if planned.lora is not None and own.lora is not None:
        learned = {"text_encoder_lr": own.lora.text_encoder_lr} if planned.lora.text_encoders else {}
        update["lora"] = planned.lora.model_copy(update={"alpha": own.lora.alpha} | learned)
    return planned.model_copy(update=update)


def planned_run(path: Path, overrides: Sequence[str], strategies: Sequence[Strategy], plans: Sequence[str]) -> Document:
    """The run in `path`, with the strategy and the plan of each of its stages."""
    documents, asked = read_stages(path, overrides)
    found = [
        {"strategy": section(carried(document, strategy)), "plan": plan}
        for document, strategy, plan in zip(documents, strategies, plans, strict=True)
    ]
    if not asked:
        return documents[0] | found[0]
    whole = {key: value for key, value in read_run(path, overrides).items() if key != "strategy"}
    return whole | {"stages": [own | each for own, each in zip(asked, found, strict=True)]}


def section(strategy: Strategy) -> Document:
    """The strategy as in a run.yaml: keys that have a value, or whose null is not the default."""
    usual = Strategy().model_dump(mode="json")
    return {
        key: {at: each for at, each in value.items() if each is not None} if isinstance(value, dict) else value
        for key, value in strategy.model_dump(mode="json").items()
        if value is not None or usual[key] is not None
    }


def instead(field: str, value: Any) -> str:
    """The error of an option that does not go with `--config`, with the key to set instead."""
    if field == "model":
        return f"--model {value} and --config each say what is planned; leave one of them out"
    return f"{option(field)} goes with --model; with --config it is --set {_setting(field, value)}"


def _setting(field: str, value: Any) -> str:
    if field == "engine":
        name, _, offload = value.partition("-")
        if name.startswith("zero"):
            return "strategy.engine=deepspeed, and --set strategy.ds_config=FILE with its stage"
        return f"strategy.engine={name}{' --set strategy.cpu_offload=true' if offload else ''}"
    if field == "features":
        return "strategy.features=online --set data.features=null" if value == "online" else "data.features=FOLDER"
    if field == "ema":
        return {"none": "strategy.ema=null", "auto": "strategy.ema={}"}.get(value, f"strategy.ema.device={value}")
    known = OPTIONS[field]
    return known["instead"] or f"{known['key']}={f'[{value}]' if field == 'ema_widths' else value}"
