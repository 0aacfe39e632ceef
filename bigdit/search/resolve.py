"""Turns what a user writes into a checked request, or reports all problems at once."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from bigdit.catalog import CatalogModel, Gpu, batch_shape, find_model
from bigdit.catalog.conditions import controlnet_problems, with_controlnet
from bigdit.catalog.context import context_misfits, context_problems
from bigdit.catalog.encoders import online_encoders
from bigdit.catalog.gpus import float8_problems, precision_problems
from bigdit.catalog.machine import resolve_gpu
from bigdit.catalog.models import aspect_sizes
from bigdit.config.wrong import expected, shown
from bigdit.errors import UserError
from bigdit.machine import memory_bytes
from bigdit.search.plan import Constraints, EngineChoice, ResolvedRequest
from bigdit.search.request import PlanRequest, Size, option
from bigdit.speed.seconds import Cluster
from bigdit.strategy import MOST_GPUS, BatchShape, OptimizerSpec, Precision, Strict
from bigdit.strategy.values import untrained_text
from bigdit.units import A_SIZE, gib, parse_bytes, parse_count, parse_memory, parse_sizes, size_text

_REQUEST_NAMES = {
    "network_gbs": "network",
    "global_batch_size": "global_batch",
    "host_memory_bytes": "host_memory",
    "micro_batch_size": "micro_batch",
    "float8": "fp8",
}
"""Fields of ResolvedRequest and Constraints that have another name in PlanRequest."""

Found = TypeVar("Found")


def resolve_request(model: str | None = None, gpu: str | None = None, **options: Any) -> ResolvedRequest:
    """The checked request of these fields of PlanRequest.

    Raises UserError with all problems, and TypeError for an unknown field.
    """
    asked = PlanRequest.of(model=model, gpu=gpu, **options)
    problems: list[str] = []
    found_model = _collect(problems, "--model", lambda: _model(model))
    device = _gpu(asked, problems)
    sizes, more = _pixels(asked, problems)
    given = _parse_values(asked, problems)
    cluster = Cluster(**_valid(Cluster, given, problems))
    fixed = Constraints(**_valid(Constraints, given, problems))
    amounts = _valid(ResolvedRequest, given, problems)
    first = None
    if found_model is not None:
        if fixed.controlnet is not None:
            problems += [f"--controlnet: {each}" for each in controlnet_problems(found_model.spec, fixed.controlnet)]
            found_model = with_controlnet(found_model, fixed.controlnet)
        aspects = asked.buckets == "aspect" or (asked.buckets is None and not found_model.video)
        frames, cp = amounts.get("frames"), fixed.cp or 1
        sizes, first, misfits = _shapes(found_model, sizes, more, aspects, frames, cp)
        problems += [*misfits, *model_fits(found_model, fixed, first)]
    problems += cluster_problems(cluster, fixed, device)
    problems += constraint_problems(cluster, fixed, device)
    if asked.lora_text_encoders and asked.lora is None:
        problems.append("--lora-text-encoders needs LoRA, and --lora is missing; add --lora 16")
    if asked.from_scratch and fixed.frozen:
        named = "--controlnet" if asked.lora is None else "--lora"
        problems.append(f"--from-scratch and {named} were given, and {named} needs trained weights; leave one out")
    if problems or found_model is None or device is None:
        raise UserError(*problems)
    if found_model.clip is not None:
        amounts.setdefault("frames", found_model.clip.frames)
    if "host_memory_bytes" not in amounts:  # with --gpu auto, this machine's memory
        own = (gpu or "").strip().casefold() == "auto"
        usual = memory_bytes() if own else device.host_bytes * cluster.processes_per_node
        amounts |= {"host_memory_bytes": usual, "host_assumed": not own}
    return ResolvedRequest(
        model=found_model,
        gpu=device,
        cluster=cluster,
        resolution=sizes[0],
        buckets=sizes[1:],
        constraints=fixed,
        **amounts,
    )


def _gpu(asked: PlanRequest, problems: list[str]) -> Gpu | None:
    """The requested GPU, less what is reserved; None, with a line in `problems`, if it is unknown."""
    found = partial(_collect, problems)
    memory = partial(_text, "--gpu-memory", asked.gpu_memory, A_SIZE)
    gpu = found("--gpu", lambda: resolve_gpu(_text("--gpu", asked.gpu), memory()))
    reserve = "0B" if asked.reserve in (0, "0") else asked.reserve
    reserved = found("--reserve", lambda: _bytes("--reserve", reserve, parse_bytes))
    if gpu is not None and (reserved or 0) >= gpu.driver_bytes:
        problems.append(
            f"--reserve {asked.reserve} leaves nothing of the {gpu.name}, which has {gib(gpu.driver_bytes)}"
        )
        return gpu
    return None if gpu is None else gpu.reserving(reserved)


def _pixels(asked: PlanRequest, problems: list[str]) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """The sizes of --resolution and of --buckets. A text that is no size adds a line to `problems`."""
    resolution = [] if asked.resolution is None else asked.resolution
    buckets = [] if asked.buckets is None or asked.buckets in ("none", "aspect") else asked.buckets
    sizes = _collect(problems, "--resolution", lambda: parse_sizes("--resolution", resolution))
    more = _collect(problems, "--buckets", lambda: parse_sizes("--buckets", buckets))
    return sizes or (), more or ()


def _parse_values(asked: PlanRequest, problems: list[str]) -> dict[str, Any]:
    """All other values by name, texts with units as numbers. A text that is no number adds a line to `problems`."""
    found, images = partial(_collect, problems), asked.images
    lora: Any = {"rank": asked.lora, "text_encoders": asked.lora_text_encoders or False}
    return vars(asked) | {
        "images": found("--images", lambda: parse_count(images, "--images") if isinstance(images, str) else images),
        "host_memory": found("--host-memory", lambda: _bytes("--host-memory", asked.host_memory, parse_memory)),
        "receipts": found("--receipts", lambda: _folder(asked.receipts)),
        "checkpointed_blocks": _number(asked.checkpointed_blocks),
        "ema": "auto" if asked.ema is None and asked.ema_widths is not None else asked.ema,
        "lora": asked.lora if isinstance(asked.lora, dict | None) else lora,
        "controlnet": _controlnet(asked.controlnet),
        "ema_widths": found("--ema-widths", lambda: _widths(asked.ema_widths)),
        **dict.fromkeys(("model", "gpu", "resolution", "buckets")),
    }


def _shapes(
    model: CatalogModel, asked: Sequence[Size], more: Sequence[Size], aspects: bool, frames: int | None, cp: int
) -> tuple[tuple[Size, ...], BatchShape | None, list[str]]:
    """The sizes to train at, the shape of the first, and problems; no shape if the first does not fit the model.

    With `aspects`, the usual aspect ratios of the first size replace `more`. Sizes that `cp` GPUs cannot share are
    problems too.
    """
    named = {**dict.fromkeys(more, "--buckets"), **dict.fromkeys(asked, "--resolution")}
    first, misfits = fitting_shape(model, next(iter(asked), None), frames, named)
    if first is None:
        return (), None, misfits
    height, width = (side * model.vae.downsample for side in first.latents[-2:])
    further = aspect_sizes(model, (height, width)) if aspects else more
    sizes = tuple(dict.fromkeys([(height, width), *asked, *further]))
    text = None if first.text is None else first.text[0]
    unshared = [*context_problems(model.spec, cp), *context_misfits(model.spec, cp, first.grids, text)]
    if not unshared and not misfits:
        grids = [grid for size in sizes for grid in batch_shape(model, size, frames).grids]
        found = context_misfits(model.spec, cp, grids, text)[:1]
        unshared = [f"{each}, or leave this one out (--buckets none)" for each in found]
    return sizes, first, [*misfits, *(problem.replace("strategy.cp", "--cp") for problem in unshared)]


def _collect(problems: list[str], option: str, make: Callable[[], Found]) -> Found | None:
    """The result of `make`; or None, with the user's errors in `problems`, each with the name of the `option`."""
    try:
        return make()
    except UserError as error:
        problems += [_with_option(option, problem) for problem in error.problems]
        return None


def _with_option(option: str, problem: str) -> str:
    if f"--{problem}".startswith(f"{option} "):
        return f"--{problem}"
    return problem if option in problem else f"{option}: {problem}"


def _model(asked: str | None) -> CatalogModel:
    name = _text("--model", asked)
    if name is None:
        raise UserError("--model is missing; name one of `bigdit models`, or a diffusers config.json or folder")
    return find_model(name)


def _text(option: str, asked: Any, expects: str = "a text was expected") -> str | None:
    if not isinstance(asked, str | Path | None):
        raise UserError(f"{option} is {shown(asked)}, and {expects}")
    return None if asked is None else str(asked)


def _number(asked: int | str | None) -> int | str | None:
    """A text such as `12` as a number; anything else unchanged."""
    return int(asked) if isinstance(asked, str) and re.fullmatch(r"\d{1,18}", asked) else asked


def _controlnet(asked: Any) -> Any:
    """`4,10` as numbers of blocks."""
    if isinstance(asked, str) and asked.count(",") > 1:
        raise UserError(f"--controlnet is {asked[:40]}, and one or two numbers were expected, such as 4 or 4,10")
    layers = map(_number, str(asked).split(","))
    return dict(zip(("layers", "single_layers"), layers, strict=False)) if isinstance(asked, int | str) else asked


def _widths(asked: str | Sequence[float] | None) -> Sequence[str | float] | None:
    """`0.05,0.1` as two texts."""
    if isinstance(asked, str) and "," not in asked:
        raise UserError(f"--ema-widths is {asked[:40]}, and two widths or more were expected, such as 0.05,0.1")
    return asked.split(",") if isinstance(asked, str) else asked


def _bytes(option: str, asked: Any, parse: Callable[[str], int]) -> int | None:
    """`205GiB` as bytes."""
    text = _text(option, asked, A_SIZE)
    return None if text is None else parse(text)


def _folder(asked: Path | str | None) -> str | None:
    folder = _text("--receipts", asked)
    if folder is not None and not os.path.isdir(folder):
        raise UserError(f"--receipts: {asked} is no folder; one with receipts of training was expected")
    return folder


def _valid(kind: type[Strict], given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The `given` values that are valid for fields of `kind`, by field. Each invalid one adds a line to `problems`."""
    sound: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        asked = _REQUEST_NAMES.get(name, name)
        if given.get(asked) is None:
            continue
        checked: Any = Annotated[field.annotation, field]
        try:
            sound[name] = TypeAdapter(checked).validate_python(given[asked])
        except ValidationError as error:
            details = error.errors()
            of_elements = [detail for detail in details if detail["loc"] and isinstance(detail["loc"][-1], int)]
            problems.append(f"{option(asked)} {expected(of_elements or details)}")  # elements before a list's length
    return sound


def cluster_problems(cluster: Cluster, fixed: Constraints, gpu: Gpu | None) -> list[str]:
    """Problems of the number of GPUs. Source: https://github.com/NVIDIA/nccl/issues/1716, NCCL without MIG."""
    gpus, per_node, problems = cluster.gpus, cluster.gpus_per_node, []
    if gpu is not None and gpu.mig and gpus > 1:
        problems.append(f"--gpus is {gpus}, and NCCL joins no MIG slices ({gpu.name}); use --gpus 1, or whole GPUs")
    if gpus > MOST_GPUS:
        problems.append(f"--gpus is {gpus}, and plans go up to {MOST_GPUS}")
    elif gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        problems.append(
            f"--gpus is {gpus}, but must be a multiple of --gpus-per-node {per_node}; "
            f"nearest: {below} or {below + per_node}"
        )
    if fixed.engine == "single" and gpus > 1:
        problems.append(
            f"--engine single runs on one GPU, and --gpus is {gpus}; use --engine ddp, zero1, zero2, zero3 or fsdp2, "
            "or --gpus 1"
        )
    if fixed.engine == "ddp" and gpus == 1:
        problems.append("--engine ddp needs several GPUs, and --gpus is 1; use --gpus 2 or more, or --engine single")
    if fixed.cp is not None and gpus % fixed.cp:
        problems.append(f"--cp is {fixed.cp}, which does not divide --gpus {gpus}")
    return problems


def constraint_problems(cluster: Cluster, fixed: Constraints, gpu: Gpu | None) -> list[str]:
    """Problems of what is fixed. Strategy's own rules say whether any strategy has all of it."""
    problems = []
    if gpu is not None and fixed.precision is not None:
        problems += [f"--precision: {problem}" for problem in precision_problems(gpu, fixed.precision)]
    if gpu is not None and fixed.float8 is not None:
        problems += [f"--fp8: {problem}" for problem in float8_problems(gpu, fixed.float8)]
    if fixed.full and fixed.frozen:
        trains = f"--lora {fixed.lora.rank} trains adapters" if fixed.lora else "--controlnet trains a ControlNet"
        problems.append(f"--full is full fine-tuning, and {trains}; leave one of them out")
    if fixed.optimizer and (missing := OptimizerSpec(name=fixed.optimizer).missing_package):
        problems.append(f"--optimizer: {missing}")
    if fixed.ema == "none" and fixed.ema_widths is not None:
        problems.append("--ema-widths were given, and --ema none keeps no EMA; leave one of them out")
    if fixed.lora_base is not None and not fixed.frozen:
        problems.append("--lora-base needs frozen weights, and all are trained; add --lora 16, or --controlnet 4")
    refusals = [_refusals(cluster, fixed, gpu, base) for base in fixed.lora_bases]
    if all(refusals):
        why = "; or: ".join(dict.fromkeys(min(each, key=len) for each in refusals))
        keys = {"engine", "optimizer", "precision", "lora_base", "float8", "cp"}
        more = ("ema", "lora", "controlnet", *(() if fixed.float8 else ("compile",)))
        keys |= {name for name in more if getattr(fixed, name) not in ("none", False)}
        given = fixed.model_dump(include=keys, exclude_none=True)
        given |= {} if fixed.lora is None else {"lora": fixed.lora.rank}
        values = ("" if isinstance(each, bool | dict) else f" {each}" for each in given.values())
        named = ", ".join(
            f"{option(_REQUEST_NAMES.get(name, name))}{value}" for name, value in zip(given, values, strict=True)
        )
        problems.append(f"{named}: {why}")
    return problems


def _refusals(cluster: Cluster, fixed: Constraints, gpu: Gpu | None, base: str | None) -> list[str]:
    """Why each strategy with these constraints and this `base` is refused; none if one is valid."""
    # For single on several GPUs, and ddp on one, the number of processes fits: cluster_problems has the error.
    engines = (fixed.engine,) if fixed.engine else get_args(EngineChoice)[cluster.gpus > 1 :]
    computed = [each for each in reversed(get_args(Precision)) if gpu is None or not precision_problems(gpu, each)]
    precisions = [fixed.precision] if fixed.precision else computed
    refusals, ema = [], {"none": None, "auto": "gpu"}.get(fixed.ema, fixed.ema)
    for engine, precision in itertools.product(engines, precisions):
        try:
            fixed.strategy(
                engine,
                base,
                ema,
                world_size=1 if engine == "single" else min(max(cluster.gpus, 1 + (fixed.engine == "ddp")), MOST_GPUS),
                micro_batch_size=fixed.micro_batch_size or 1,
                precision=precision,
                optimizer={"name": fixed.optimizer or "adamw"},
                cp=1 if fixed.cp is None or cluster.gpus % fixed.cp else fixed.cp,
            )
        except ValidationError as error:
            refusals.append("; ".join(detail["msg"].removeprefix("Value error, ") for detail in error.errors()))
        else:
            return []
    return refusals


def fitting_shape(
    model: CatalogModel, size: Size | None, frames: int | None, asked: Mapping[Size, str]
) -> tuple[BatchShape | None, list[str]]:
    """The shape of a sample of `size`, or of the model's own size; and problems of it and of all `asked`, which has
    option names by size."""
    problems: list[str] = []
    shapes: dict[Size | None, BatchShape] = {}
    for each, named in ((size, "--resolution"), *asked.items()):
        try:
            shapes[each] = batch_shape(model, each, frames)
        except UserError as error:
            where = named if each is None else f"{named} {size_text(each)}"
            problems += [f"{'--frames' if 'frames' in problem else where}: {problem}" for problem in error.problems]
    return shapes.get(size), list(dict.fromkeys(problems))


def model_fits(model: CatalogModel, fixed: Constraints, shape: BatchShape | None) -> list[str]:
    """Problems of the model: it has fewer blocks, or its encoders are needed and unknown."""
    problems: list[str] = []
    blocks, most = fixed.checkpointed_blocks, model.block_count
    if isinstance(blocks, int) and most and blocks > most:
        problems.append(f"--checkpointed-blocks is {blocks}, and {model.name} has {most} blocks; use {most} or all")
    if fixed.features == "online" and shape is not None:
        _collect(problems, "--features online", lambda: online_encoders(model, shape))
    if fixed.lora is not None and fixed.lora.text_encoders and (why := untrained_text(model.spec.class_name)):
        problems.append(why.replace("strategy.lora.text_encoders", "--lora-text-encoders"))
    return problems
