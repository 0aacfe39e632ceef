"""From a run's YAML to the questions that plans of its stages answer: what it says is pinned, all else is asked."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigdit.config import RunConfig
from bigdit.config.check import online_problems
from bigdit.config.data import frames_of
from bigdit.config.deepspeed import read_ds_config
from bigdit.config.encoders import IdentityCodec
from bigdit.config.load import parse_run
from bigdit.config.planned import COMPILED, at
from bigdit.config.run import EngineConfig, TrainConfig
from bigdit.config.stages import of_each, read_stages, with_set
from bigdit.config.strategy import PRESETS
from bigdit.encoders.host_bytes import host_weights
from bigdit.errors import UserError
from bigdit.search.ask import question_for
from bigdit.search.question import Question
from bigdit.search.request import OPTIONS, option
from bigdit.spec import LoraSpec, Strict

_UNPINNED: dict[str, type[Strict]] = {
    "train.lora.base": LoraSpec,
    "train.lora.dora": LoraSpec,
    "train.lora.targets": LoraSpec,
    "train.checkpointing": TrainConfig,
    "train.offload_activations": TrainConfig,
    "train.blocks_to_swap": TrainConfig,
    "train.optimizer_in_backward": TrainConfig,
    "engine.reshard_after_forward": EngineConfig,
    "engine.dp_replicate": EngineConfig,
}
"""What a run may say of memory or speed, and a plan chooses by itself, or has otherwise; and whose defaults it has."""


def questions_of(path: Path, overrides: Sequence[str], asked: Mapping[str, Any]) -> list[Question]:
    """A question for each stage of the run that `path` describes; of one without stages, one. `asked`: what the YAML
    does not say, as `question_for` takes it. Raises UserError with all problems."""
    documents, said = read_stages(path, overrides)

    def one(number: int) -> Question:
        try:
            return _question(documents[number], asked)
        except UserError as error:
            raise UserError(*(_by_key(problem) for problem in error.problems)) from None

    try:
        return of_each(range(len(documents)), one)
    except UserError as error:
        raise UserError(
            *(with_set(f"{path}: {problem}", path, overrides, said) for problem in error.problems)
        ) from None


def unpinned(path: Path, overrides: Sequence[str]) -> list[str]:
    """What a run says that its plan does not pin, or is not of, as lines: one a key, whichever stage says it."""
    documents, _ = read_stages(path, overrides)
    said = set()
    for (key, of), document in itertools.product(_UNPINNED.items(), documents):
        found = at(document, key.split("."))
        if found is not None and found != of.model_fields[key.rsplit(".", 1)[1]].default:
            said.add((key, str(found)))
    lines = [f"{key} is {found}, which plans do not pin: this one chooses by itself" for key, found in sorted(said)]
    if any(at(document, ["train", "compile_blocks"]) for document in documents):
        lines.append(COMPILED)
    return [f"{path}: {line}" for line in lines]


def _question(document: dict[str, Any], asked: Mapping[str, Any]) -> Question:
    whole = copy.deepcopy(document)
    train = whole.setdefault("train", {})
    if isinstance(train, dict):
        train.setdefault("micro_batch_size", 1)  # which a plan may be to say, and a run has to
    run = parse_run(whole, "run")
    if problems := online_problems(run):
        raise UserError(*problems)

    def said(key: str, value: Any) -> Any:
        return None if at(document, key.split(".")) is None else value

    gpus = said("engine.processes", run.engine.processes)
    if None not in (gpus, asked.get("gpus")) and gpus != asked["gpus"]:
        raise UserError(f"engine.processes is {gpus}, and --gpus {asked['gpus']}; leave one of them out")
    largest, *_ = buckets = sorted(run.data.buckets, key=math.prod, reverse=True)
    batch = _global_batch(run, document)
    question = question_for(
        _model(run),
        resolution=list(dict.fromkeys((bucket[-2], bucket[-1]) for bucket in buckets)),
        buckets="none",
        frames=frames_of(largest) if len(largest) == 3 else None,
        global_batch=batch,
        engine=said("engine.name", _engine(run)),
        optimizer=said("optimizer.name", run.optimizer.name),
        precision=said("train.precision", run.train.precision),
        checkpointed_blocks=said("train.checkpointed_blocks", run.train.checkpointed_blocks),
        micro_batch=said("train.micro_batch_size", run.train.micro_batch_size),
        ema=None if run.train.ema is None else run.train.ema.device,
        ema_widths=None if run.train.ema is None else run.train.ema.widths,
        lora=None if run.train.lora is None else run.train.lora.rank,
        features="online" if run.data.online else None,
        full=run.train.lora is None,
        **{**asked, "gpus": gpus or asked.get("gpus")},
    )
    held_out = 0 if run.validation is None else run.validation.samples
    seen: dict[str, Any] = {"held_out": held_out, "samples": run.samples and host_weights(run.encoders)}
    if question.images is not None and question.images <= held_out:
        raise UserError(f"validation.samples is {held_out}, and --images {question.images} leaves none to train on")
    if run.train.epochs is not None:
        seen["epochs"] = run.train.epochs
    elif question.images is not None and batch is not None:
        seen["epochs"] = run.train.known_steps * batch / (question.images - held_out)
    return question.model_copy(update=seen)


def _model(run: RunConfig) -> str:
    if (name := run.model.name or run.model.path) is None:
        raise UserError("model.class_name says what is trained; plans take model.name or model.path, a config.json")
    if isinstance(run.encoders.image, IdentityCodec):
        raise UserError(
            "encoders.image is identity, and plans are of a VAE's latents; `bigdit train` measures this run"
        )
    return str(name)


def _global_batch(run: RunConfig, document: dict[str, Any]) -> int | None:
    train = run.train
    if train.global_batch_size is not None or train.grad_accum_steps is None:
        return train.global_batch_size
    if at(document, ["train", "micro_batch_size"]) is None:
        return None
    return train.micro_batch_size * train.grad_accum_steps * run.engine.processes


def _engine(run: RunConfig) -> str:
    """By the name of its preset."""
    if run.engine.name != "deepspeed":
        return f"{run.engine.name}{'-offload' if run.engine.cpu_offload else ''}"
    zero = {} if run.engine.ds_config is None else read_ds_config(run.engine.ds_config).get("zero_optimization", {})
    moved = [
        part for part in ("optimizer", "param") if zero.get(f"offload_{part}", {}).get("device") in ("cpu", "nvme")
    ]
    name = f"zero{zero.get('stage', 0)}{'-offload' if moved else ''}{'-all' if 'param' in moved else ''}"
    if name not in PRESETS:
        raise UserError(f"engine.ds_config {run.engine.ds_config} is {name}, which is not planned; leave it out")
    return name


def _by_key(problem: str) -> str:
    """The problem by the keys of the run, in the place of options."""
    problem = problem.removeprefix("run: ").replace("--gpus is", "engine.processes is")
    keys = {option(name): known["key"] for name, known in OPTIONS.items() if known["key"]}
    return re.sub("|".join(rf"{name}(?![\w-])" for name in keys), lambda found: keys[found[0]], problem)


def instead(field: str, value: Any) -> str:
    """What is said of an option that was given beside `--config`, with the way there is."""
    if field == "model":
        return f"--model {value} and --config each say what is planned; leave one of them out"
    return f"{option(field)} goes with --model; with --config it is --set {_said(field, value)}"


def _said(field: str, value: Any) -> str:
    if field == "engine":
        name, _, offload = value.partition("-")
        if name.startswith("zero"):
            return "engine.name=deepspeed, and --set engine.ds_config=FILE with its stage"
        return f"engine.name={name}{' --set engine.cpu_offload=true' if offload else ''}"
    if field == "features":
        return f"data.features={'online' if value == 'online' else 'FOLDER'}"
    if field == "ema":
        return {"none": "train.ema=null", "auto": "train.ema={}"}.get(value, f"train.ema.device={value}")
    known = OPTIONS[field]
    return known["instead"] or f"{known['key']}={f'[{value}]' if field == 'ema_widths' else value}"
