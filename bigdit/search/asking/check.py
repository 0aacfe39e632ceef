"""What cannot be asked of a plan: each contradiction as one line, with the nearest question that can be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import ValidationError

from bigdit.catalog import CatalogModel, Gpu, batch_shape
from bigdit.catalog.encoders import online_encoders
from bigdit.config.strategy import MOST_GPUS, PRESETS
from bigdit.errors import UserError
from bigdit.profile.request import model_problems, precision_problems
from bigdit.search.asking.buckets import Size, written
from bigdit.search.question import EngineChoice, Pins
from bigdit.spec import BatchShape, EmaSpec, LoraBase, LoraSpec, OptimizerSpec, Precision, Strategy
from bigdit.speed.cluster import Cluster


def cluster_problems(cluster: Cluster, pins: Pins, global_batch_size: int | None, gpu: Gpu | None) -> list[str]:
    """Whether the cards make a layout, and the global batch can be shared out over it.

    Source: https://github.com/NVIDIA/nccl/issues/1716, NCCL without MIG.
    """
    gpus, per_node, problems = cluster.gpus, cluster.gpus_per_node, []
    if gpu is not None and gpu.mig and gpus > 1:
        problems.append(f"--gpus is {gpus}, and NCCL joins no MIG slices ({gpu.name}); use --gpus 1, or whole cards")
    if gpus > MOST_GPUS:
        problems.append(f"--gpus is {gpus}, and plans go up to {MOST_GPUS}")
    elif gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        problems.append(
            f"--gpus is {gpus}, and machines of --gpus-per-node {per_node} come to multiples of {per_node}; "
            f"nearest: {below} or {below + per_node}"
        )
    if pins.engine == "single" and gpus > 1:
        problems.append(
            f"--engine single runs on one card, and --gpus is {gpus}; use --engine zero1, zero2, zero3 or fsdp2, or "
            "--gpus 1"
        )
    if global_batch_size is not None:
        problems += _sharing_problems(global_batch_size, gpus, pins.micro_batch_size)
    return problems


def _sharing_problems(global_batch_size: int, gpus: int, micro_batch_size: int | None) -> list[str]:
    one_pass = gpus * (micro_batch_size or 1)
    below, rest = divmod(global_batch_size, one_pass)
    if not rest:
        return []
    shared = f"{gpus} {'card' if gpus == 1 else 'cards'}"
    shared += "" if micro_batch_size is None else f" × --micro-batch {micro_batch_size}"
    near = f"{below * one_pass} or {(below + 1) * one_pass}" if below else f"{one_pass}"
    return [f"--global-batch is {global_batch_size}, and {shared} come to multiples of {one_pass}; nearest: {near}"]


def pin_problems(cluster: Cluster, pins: Pins, gpu: Gpu | None) -> list[str]:
    """Whether any strategy has all that is pinned: the rules are those of Strategy itself."""
    problems = []
    if gpu is not None and pins.precision is not None:
        problems += [f"--precision: {problem}" for problem in precision_problems(gpu, pins.precision)]
    if pins.full and pins.lora_rank is not None:
        problems.append(
            f"--full trains all weights, and --lora {pins.lora_rank} adapters beside frozen ones; leave one of them out"
        )
    if pins.ema == "none" and pins.ema_widths is not None:
        problems.append("--ema-widths are of averages, and --ema none keeps none; leave one of them out")
    bases: tuple[str | None, ...] = (None,) if pins.lora_rank is None else get_args(LoraBase)
    refusals = [_refusals(cluster, pins, gpu, base) for base in bases]
    if all(refusals):
        why = "; or: ".join(min(each, key=len) for each in refusals)
        problems.append(f"{_named(pins)}: no strategy has this: {why}")
    return problems


def _refusals(cluster: Cluster, pins: Pins, gpu: Gpu | None, base: str | None) -> list[str]:
    """Why each strategy with these pins is refused, adapters over a `base`; none where one is not."""
    # One process is taken for the engine single on several cards: cluster_problems says what is wrong there.
    engines = (pins.engine,) if pins.engine else get_args(EngineChoice)[cluster.gpus > 1 :]
    precisions = (pins.precision,) if pins.precision else _computed(gpu)
    refusals = []
    for engine, precision in itertools.product(engines, precisions):
        try:
            Strategy(
                **PRESETS[engine],
                world_size=1 if engine == "single" else cluster.gpus,
                micro_batch_size=pins.micro_batch_size or 1,
                precision=precision,
                optimizer=OptimizerSpec(name=pins.optimizer or "adamw"),
                ema=None if pins.ema == "none" else EmaSpec(device=_place(pins.ema), widths=pins.ema_widths),
                lora=None if base is None else LoraSpec.model_validate({"rank": pins.lora_rank, "base": base}),
                features=pins.features,
            )
        except ValidationError as error:
            refusals.append("; ".join(detail["msg"].removeprefix("Value error, ") for detail in error.errors()))
        else:
            return []
    return refusals


def _place(ema: str) -> Literal["gpu", "cpu"]:
    return "cpu" if ema == "cpu" else "gpu"


def _computed(gpu: Gpu | None) -> list[Precision]:
    """The precisions that the card computes, the smallest types first."""
    return [each for each in reversed(get_args(Precision)) if gpu is None or not precision_problems(gpu, each)]


def _named(pins: Pins) -> str:
    """The pins that a strategy can be refused for, as options."""
    pinned = {"engine": pins.engine, "optimizer": pins.optimizer, "precision": pins.precision, "lora": pins.lora_rank}
    return ", ".join(f"--{name} {value}" for name, value in pinned.items() if value is not None)


def fitting_shape(
    model: CatalogModel, size: Size | None, frames: int | None, asked: Mapping[Size, str]
) -> tuple[BatchShape | None, list[str]]:
    """A sample of `size`, or of the model's own; and what is wrong with it and all `asked`, by size and option."""
    problems: list[str] = []
    shapes: dict[Size | None, BatchShape] = {}
    for each, option in ((size, "--resolution"), *asked.items()):
        try:
            shapes[each] = batch_shape(model, each, frames)
        except UserError as error:
            problems += [_of_size(problem, each, option) for problem in error.problems]
    return shapes.get(size), list(dict.fromkeys(problems))


def _of_size(problem: str, size: Size | None, option: str) -> str:
    if "frames" in problem:
        return f"--frames: {problem}"
    if size is None:
        return f"{option}: {problem}"
    return f"{option} {written(size)}: {problem}"


def model_fits(model: CatalogModel, pins: Pins, shape: BatchShape | None) -> list[str]:
    """Whether the model can be planned, has as many blocks, and encoders that are known where they are wanted."""
    problems, blocks, pinned = model_problems(model), model.block_count, pins.checkpointed_blocks
    if isinstance(pinned, int) and blocks and pinned > blocks:
        problems.append(
            f"--checkpointed-blocks is {pinned}, and {model.name} has {blocks} blocks; {blocks} and all are the most"
        )
    if pins.features == "online" and shape is not None:
        try:
            online_encoders(model, shape)
        except UserError as error:
            problems += [f"--features online: {problem}" for problem in error.problems]
    return problems
