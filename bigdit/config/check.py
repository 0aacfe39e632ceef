"""Checks across sections, and of sections against the model, all reported at once.

Options of `accelerate launch` must agree with the run too. They reach processes as environment variables for
accelerate's own Accelerator, which bigdit does not use. A run that ignored them would train otherwise than asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigdit.config.data import DataConfig, IdentityCodec, VaeCodec, fitting_bucket, written_bucket
from bigdit.config.load import read_ds_config
from bigdit.config.run import RunConfig, TrainConfig
from bigdit.config.wrong import wrong
from bigdit.dist import ACCELERATE, asked_of_accelerate
from bigdit.documents import differences, written
from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec, meaningless
from bigdit.processes import entry
from bigdit.strategy import ModelSpec, OptimizerSpec, Strategy, untrained_text
from bigdit.units import how_many_of


def check(run: RunConfig, model: ModelSpec) -> None:
    """Raise UserError with all contradictions between the sections of `run`, and between `run` and its model."""
    problems = [*_check_latents(run, model), *_check_text(run, model), *_check_objective(run, model)]
    problems += [*online_problems(run), *_check_trained_text(run, model), *_check_start(run), *_check_images(run)]
    problems += schedule_problems(run.train, run.strategy.optimizer)
    if problems:
        raise UserError(*problems)


def _check_start(run: RunConfig) -> Iterator[str]:
    """Weights to start from that are missing or have no use, and EMAs without snapshots."""
    if run.strategy.frozen and run.model.init_from is None:
        key = "lora adapts" if run.strategy.lora is not None else "controlnet needs"
        yield f"strategy.{key} trained weights, and model.init_from is missing; set it to a folder of diffusers weights"
    if run.strategy.lora is None and run.model.lora_from is not None:
        yield "model.lora_from is set, and strategy.lora is not; set it, or leave model.lora_from out"
    ema = run.strategy.ema
    if run.train.snapshot_every is not None and (ema is None or ema.widths is None):
        yield (
            f"train.snapshot_every is {run.train.snapshot_every}, and strategy.ema.widths is missing: an EMA of "
            "another width is made from two; set it to [0.05, 0.1], or leave snapshot_every out"
        )


def check_paths(config: Path, runs: Iterable[RunConfig]) -> None:
    """Raise UserError if a path in `config` exists relative to its folder, but not to the working folder."""
    asked = [found for run in runs for found in paths(run.model_dump(exclude={"output", "plan"}), "")]
    problems = [
        f"{key}: {path} does not exist in {Path.cwd()}, and paths are relative to the folder of the command; "
        f"{config.parent / path} exists: write that, or run the command in {config.parent}"
        for key, path in asked
        if not path.is_absolute() and not path.exists() and (config.parent / path).exists()
    ]
    if problems:
        raise UserError(*dict.fromkeys(problems))


def paths(value: object, key: str) -> Iterator[tuple[str, Path]]:
    """(key, path) of all paths in a document."""
    if isinstance(value, Path):
        yield key, value
    elif isinstance(value, dict | list | tuple):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(inner, f"{key}.{name}".removeprefix("."))


SCHEMA = "schema.json"
"""A file that every cache has. store/schema.py names it too, but imports torch."""


def has_store(data: DataConfig) -> bool:
    """Whether data.features is a local folder that holds a cache."""
    return data.features is not None and (data.features / SCHEMA).exists()


def lacks_store(data: DataConfig) -> bool:
    """Whether data.features is a local folder, or no URL, and holds no cache."""
    return data.features is not None and not re.match(r"\w+:/", str(data.features)) and not has_store(data)


def no_store(features: object) -> UserError:
    """The error for a folder or URL without a cache, or with parts of one that lost its schema."""
    folder, extract = Path(str(features)), "`bigdit extract --config RUN.yaml`"
    if any(folder.glob("part-*.safetensors")):
        return UserError(
            f"data.features: {folder / SCHEMA} is missing, and parts are there; {extract} writes it, and keeps them"
        )
    return UserError(f"data.features: {features} holds no latents; {extract} makes them")


def check_store(data: DataConfig) -> None:
    """Raise UserError if features are online or the cache is missing.

    FeatureStore.open checks that too, but imports torch first, which takes seconds.
    """
    if data.features is None:
        raise UserError("strategy.features is online, and a cache is read; set it to cached")
    if lacks_store(data):
        raise no_store(data.features)


def _check_images(run: RunConfig) -> Iterator[str]:
    """samples.images must be one, or as many as samples.captions, if samples begin with an image or edit one."""
    if run.samples is None:
        return
    images, captions = len(run.samples.images), len(run.samples.captions)
    references = run.data.references
    each = references or 1
    many = how_many_of(run.data.reference_counts or range(1, 2), "image")
    needs = {
        f"data.references needs {many} for each edit": references,
        "data.fill needs an image for each": run.data.fill,
        "encoders.first_frame needs an image for each video": run.encoders.first_frame is not None,
    }
    if not any(needs.values()):
        unset = "encoders.first_frame, data.references and data.fill are not"
        if images:
            yield f"samples.images is set, and {unset}; leave it out"
    elif images not in (*run.data.reference_counts, each, each * captions):
        why, one = next(why for why, needed in needs.items() if needed), "one" if each == 1 else str(each)
        yield (
            f"samples.images has {images} for {captions} of samples.captions, and {why}; name {one} for all, or {one} "
            "for each"
        )


def _check_trained_text(run: RunConfig, model: ModelSpec) -> Iterator[str]:
    """Adapters of text encoders need CLIP, and no validation images: their captions are encoded only once."""
    if not run.strategy.trains_text:
        return
    key, text, dtype = "strategy.lora.text_encoders is true", run.encoders.text, run.strategy.text_dtype
    if (why := untrained_text(model.class_name)) is not None:
        yield why
        return
    if text is None or text.pipeline is None:
        yield f"{key}, and encoders.text.pipeline is missing; set it to the folder of the model's pipeline"
    elif text.dtype != dtype:
        yield (
            f"{key}, and encoders.text.dtype is {text.dtype}, with strategy.precision {run.strategy.precision}; set "
            f"it to {dtype}"
        )
    if run.samples is not None:
        yield (
            f"{key}, and samples encodes its captions once, before the encoders are trained; leave samples out, and "
            "use `bigdit sample`"
        )


def online_problems(run: RunConfig) -> list[str]:
    """Why a run with strategy.features online must use a cache instead."""
    if run.strategy.features == "cached":
        return []
    cached = "set strategy.features to cached, and run `bigdit extract` first"
    if run.strategy.trains_text:
        cached = "set strategy.lora.text_encoders to false, and strategy.features to cached"
    return [
        f"strategy.features is online, and {why}{', or' if '; ' in why else ';'} {cached}" for why in _not_online(run)
    ]


def _not_online(run: RunConfig) -> Iterator[str]:
    image, text = run.encoders.image, run.encoders.text
    if len(buckets := run.data.all_buckets) > 1:
        yield f"data.buckets has {len(buckets)}: the bucket of an image is known only after all were read"
    if run.validation is not None:
        yield "validation needs samples of a cache"
    if run.encoders.first_frame is not None:
        yield "encoders.first_frame needs a cache"
    if run.data.references:
        yield f"data.references is {run.data.references}, which needs a cache"
    if run.data.fill:
        yield "data.fill is true, which needs a cache"
    if run.encoders.device != "auto":
        yield f"encoders.device is {run.encoders.device}: encoders must be on the model's device; set it to auto"
    if isinstance(image, VaeCodec) and image.latents == "moments":
        yield "encoders.image.latents is moments, which needs a cache; set it to mode or sampled"
    if text is not None and text.stored != "bf16":
        yield f"encoders.text.stored is {text.stored}, which needs a cache; leave it out"


def _check_latents(run: RunConfig, model: ModelSpec) -> list[str]:
    codec = run.encoders.image
    if not isinstance(codec, IdentityCodec):
        return []  # a VAE's channels are known only when it is loaded: extraction checks them
    problems = []
    channels = codec.factor**2 * (1 if codec.color == "gray" else 3)
    taken, out = (model.kwargs.get(key) for key in ("in_channels", "out_channels"))
    blank = isinstance(out, int) and taken == 2 * out + 1  # HunyuanVideo-1.5 also takes a first frame and its mask
    key = "in_channels" if run.encoders.first_frame is None and not blank else "out_channels"
    wanted = model.kwargs.get(key)
    if wanted is not None and wanted != channels:
        problems.append(
            f"encoders.image gives {channels} channels (factor {codec.factor}, {codec.color}), "
            f"and the model's {key} is {wanted}; {_fitting(codec, wanted)}"
        )
    patch = model.kwargs.get("patch_size", 1)  # the model itself reports other values
    patch = patch[-1] if isinstance(patch, list | tuple) and patch else patch  # (frames, height, width) of videos
    side = codec.factor * (patch if isinstance(patch, int) and patch > 0 else 1)
    return problems + [
        f"{key}: {written_bucket(bucket)} does not divide by {side} (factor × patch_size); nearest: "
        f"{written_bucket(fitting_bucket(bucket, side))}"
        for key, buckets in run.data.keyed_buckets.items()
        for bucket in buckets
        if any(length % side for length in bucket[-2:])
    ]


def _fitting(codec: IdentityCodec, wanted: Any) -> str:
    """The settings that give `wanted` channels."""
    for color, colors in (("gray", 1), ("rgb", 3)):
        if wanted == codec.factor**2 * colors:
            return f"set encoders.image.color to {color}"
    vae = "set encoders.image to the model's VAE (name: vae, class_name, path)"
    for color, colors in (("rgb", 3), ("gray", 1)):
        factor = math.isqrt(wanted // colors) if isinstance(wanted, int) and wanted > 0 else 0
        if factor and factor**2 * colors == wanted:
            return f"{vae}, or, for pixels, its factor to {factor} and its color to {color}"
    return vae


def _check_text(run: RunConfig, model: ModelSpec) -> Iterator[str]:
    """Contradictions between captions, classes, text encoders and the model."""
    text, labelled = run.encoders.text, [source.label is not None for source in run.data.images]
    if any(labelled):
        yield from _check_labels(run, labelled.count(False))
    elif run.data.classes is not None:
        yield "data.classes is set, and data.images has no label; set it, or leave data.classes out"
    elif text is None:
        yield (
            "encoders.text is missing, and no source of data.images has a label: a model needs captions or "
            "classes; set encoders.text to a mapping of pipeline, path or config; or, for a model of classes, "
            "data.images to one such as {path: FOLDER, label: folder}"
        )
    elif sum(way is not None for way in (text.pipeline, text.path, text.config)) != 1:
        yield (
            "encoders.text needs one of pipeline (a diffusers pipeline's folder), path (a T5's folder) and config "
            "(random weights)"
        )
    elif text.files and text.pipeline is None:
        yield (
            "encoders.text.files is set, and encoders.text.pipeline is missing; set it to a folder with tokenizers and "
            "configurations"
        )
    else:
        dim, wanted = (text.config or {}).get("d_model"), model.kwargs.get("caption_channels")
        wanted = wanted[0] if isinstance(wanted, list) and wanted else wanted  # HiDream's list: of T5, and of Llama
        if dim is not None and wanted is not None and dim != wanted:
            yield f"encoders.text.config.d_model is {dim}, and the model's caption_channels is {wanted}"


def schedule_problems(train: TrainConfig, optimizer: OptimizerSpec) -> list[str]:
    """Contradictions of the learning rate's schedule; those with its length if the number of steps is known."""
    kind, decay, problems = train.lr_schedule, train.decay_steps, []
    if train.steps is None:
        pass  # checked again after the epochs were counted
    elif train.warmup_steps > train.steps:
        problems.append(f"train.warmup_steps is {train.warmup_steps}, beyond train.steps {train.steps}")
    elif train.warmup_steps + (decay or 0) > train.steps:
        problems.append(
            f"train.decay_steps is {decay}, and train.warmup_steps {train.warmup_steps} leave "
            f"{train.steps - train.warmup_steps} of train.steps {train.steps} to it"
        )
    if (decay is None) == (kind == "wsd"):
        found = "missing" if decay is None else f"{decay}"
        problems.append(f"train.decay_steps is {found}, and train.lr_schedule is {kind}; only wsd has it, and needs it")
    if optimizer.name == "adamw_schedulefree" and kind != "constant":
        problems.append(
            f"train.lr_schedule is {kind}, and strategy.optimizer.name adamw_schedulefree averages weights instead of "
            "lowering the rate; set train.lr_schedule to constant (train.warmup_steps may stay)"
        )
    if train.min_lr and kind == "constant":
        problems.append(
            f"train.min_lr is {train.min_lr:g}, and train.lr_schedule is constant; cosine and wsd fall to it"
        )
    if train.min_lr > (lr := optimizer.lr):
        problems.append(f"train.min_lr is {train.min_lr:g}, above strategy.optimizer.lr {lr:g}, which falls to it")
    return problems


def _check_labels(run: RunConfig, unlabelled: int) -> Iterator[str]:
    if unlabelled:
        yield f"data.images: {unlabelled} of {len(run.data.images)} sources have no label; give each one"
    if run.encoders.text is not None:
        yield "encoders.text encodes captions, and data.images has a label instead; leave out one of them"
    classes = run.data.classes or ()
    if twice := sorted({name for name in classes if classes.count(name) > 1}):
        yield f"data.classes names {', '.join(twice[:3])} twice; each class has one number"


def _check_objective(run: RunConfig, model: ModelSpec) -> list[str]:
    objective = run.objective
    problems = [] if objective is None else meaningless(objective)
    channels, predicted = (model.kwargs.get(key) for key in ("in_channels", "out_channels"))
    if not isinstance(objective, DdpmSpec) or not objective.learned_variance:
        return problems
    if not isinstance(channels, int) or predicted in (None, 2 * channels):
        return problems
    return [
        *problems,
        f"objective.learned_variance is true, and the model's out_channels is {predicted}: with a variance it is "
        f"{2 * channels}, twice in_channels; set it to that, or objective.learned_variance to false",
    ]


_ENGINES = {"use_deepspeed": "deepspeed", "use_fsdp": "fsdp2", "use_megatron_lm": "megatron"}
_STARTED = {
    "ddp": "use --multi_gpu",
    "deepspeed": "use --use_deepspeed",
    "fsdp2": "use --use_fsdp --fsdp_version 2, or --multi_gpu",
}
_PRECISIONS = {"fp32": "no", "tf32": "no", "bf16": "bf16", "bf16_sr": "bf16", "fp16": "fp16"}


def _started(engine: str) -> str:
    """How to start a run with this engine."""
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
