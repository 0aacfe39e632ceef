"""Builds a stage's model with its engine on the device; checks models without their weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from bigdit import checkpoint, engines, models
from bigdit.catalog import FAMILIES, batch_shape
from bigdit.catalog.families import objective_of, takes_more_channels
from bigdit.catalog.resolve import model_of_arguments, read_model_config
from bigdit.config.check import check
from bigdit.config.run import CHECKPOINTS, RunConfig
from bigdit.config.stages import of_each
from bigdit.dist import World
from bigdit.engines import Ema, Engine
from bigdit.errors import UserError
from bigdit.models import Family
from bigdit.models.equip import compile_notices
from bigdit.models.family import arguments
from bigdit.models.float8 import float8_notices
from bigdit.objective_spec import ObjectiveSpec
from bigdit.strategy import ModelSpec, Strategy
from bigdit.train.data import TrainData
from bigdit.train.measure import MemoryMeter
from bigdit.train.monitor.seconds import Collectives
from bigdit.train.oom_fallback import OomFallback, read_oom_fallback, smaller_strategy
from bigdit.train.prepare import Prepared, log_lines
from bigdit.train.record import PlannedMemory, planned_memory
from bigdit.train.resume import Start
from bigdit.train.saves import export_missed, snapshot_notices


@dataclass(frozen=True)
class TrainState:
    """An `engine`, what it trains, and its measured and planned memory.

    `fallback`: the strategy after steps that ran out of memory. `smaller`: the next one, None if there is none. `peers`
    answer while main threads are inside a step. `collectives`: None with a single process.
    """

    engine: Engine
    ema: Ema | None
    family: Family
    objective: ObjectiveSpec
    meter: MemoryMeter
    planned: PlannedMemory | None
    fallback: OomFallback
    smaller: Strategy | None
    peers: checkpoint.Peers
    collectives: Collectives | None

    @property
    def strategy(self) -> Strategy:
        """The strategy in use."""
        return self.fallback.now


def build_state(start: Start, data: TrainData, world: World, device: torch.device, stack: ExitStack) -> TrainState:
    """The current stage's model and engine, from the checkpoint if there is one.

    Raises UserError if weights or the checkpoint cannot be read.
    """
    found, spec, run, plan = start.found, start.stage.spec, start.stage.run, start.stage.plan
    family, peers = models.family(spec.class_name), checkpoint.Peers(world)
    collectives = stack.enter_context(Collectives()) if world.world_size > 1 else None
    (fallback, *_) = peers.gather(read_oom_fallback(run.output, start.stage.strategy) if world.is_main else None)
    assert fallback is not None
    strategy = fallback.now
    if found is not None:
        checkpoint.verify(found, peers)
        if world.is_main:
            export_missed(run, start.ends, found)
    model = models.equip(_weights(start, strategy), family, strategy, seed=run.train.seed)
    if data.encoders is not None and strategy.trains_text:
        models.adapt_text(model, data.encoders.trained, strategy, seed=run.train.seed)
    sizes = () if plan is None else (plan.strategy.step_size, *plan.smaller)
    smaller = smaller_strategy(strategy, sizes, len(family.blocks(model)))
    log_lines(world, [*snapshot_notices(run, model), *models.rank_notices(model)], notes=True)
    if found is not None:
        checkpoint.load_weights(found, model)
    elif run.model.lora_from is not None and strategy.lora is not None:
        log_lines(world, checkpoint.load_adapters(model, spec, strategy.lora, run.model.lora_from), notes=True)
    meter = MemoryMeter(device)
    compiled = compile_notices(strategy, sum(samples > 0 for samples in data.order.samples_of_epoch))
    log_lines(world, [*float8_notices(model, family, strategy), *compiled], notes=True)
    engine = engines.create(strategy, model, family, device=device)
    ema = engines.ema_of(engine)
    if found is not None:
        checkpoint.restore(found, engine, peers, ema)
        log_lines(world, [f"resuming from {found.folder}, step {start.step}"])
    objective, planned = objective_of(spec, run.objective), planned_memory(plan, strategy, device.type)
    return TrainState(engine, ema, family, objective, meter, planned, fallback, smaller, peers, collectives)


def _weights(start: Start, strategy: Strategy) -> nn.Module:
    """The plain model in CPU memory: without values if a checkpoint fills all, else from init_from, or random."""
    spec, run = start.stage.spec, start.stage.run
    dtype, source = engines.compute_dtype(strategy), run.model.init_from
    if start.found is not None and not strategy.frozen:
        return models.skeleton(spec, dtype=dtype)
    if source is not None:
        return checkpoint.load_model(spec, source, dtype=dtype)
    return models.build(spec, device="cpu", dtype=dtype, seed=run.train.seed)


def check_models(stages: Sequence[Prepared]) -> list[nn.Module]:
    """`check_model` of each stage. Raises UserError with all problems."""
    found = of_each(stages, lambda each: check_model(each.run, each.spec, each.strategy))
    first = stages[0]
    _check_start(first.run, first.spec)
    lora, adapters = first.strategy.lora, first.run.model.lora_from
    if adapters is not None and lora is not None and not _resumes(first.run):
        checkpoint.load_adapters(found[0], first.spec, lora, adapters)
    return found


def _check_start(run: RunConfig, spec: ModelSpec) -> None:
    """Raise UserError if model.init_from holds no weights. A run that resumes reads only a frozen base from it."""
    source = run.model.init_from
    if source is None or (not run.strategy.frozen and _resumes(run)):
        return
    checkpoint.check_start(spec, source)


def _resumes(run: RunConfig) -> bool:
    return any((run.output / CHECKPOINTS).glob("step-*"))


def check_model(run: RunConfig, spec: ModelSpec, strategy: Strategy) -> nn.Module:
    """The model as it is trained, on the meta device, with the class's defaults for what the config leaves out.

    Raises UserError if the class rejects the arguments, or the model does not fit the run.
    """
    engines.check(strategy)
    family = models.family(spec.class_name)
    model = models.outline(spec)
    made = spec.model_copy(update={"kwargs": dict(arguments(model))})
    check(run, made)
    _check_left_out(run, made)
    channels, predicted = (made.kwargs.get(key) for key in ("in_channels", "out_channels"))
    fed = channels // _packed(made) ** 2 if isinstance(channels, int) else None
    if fed is not None and not takes_more_channels(made) and predicted not in (None, fed, fed + fed):  # with variance
        raise UserError(
            f"model.kwargs.out_channels is {predicted}, and in_channels is {channels}: the prediction has the channels "
            f"of the latents; set out_channels to {fed}"
        )
    if run.model.name is None:
        _check_shapes(run, made)
    return models.equip(model, family, strategy)


def _check_shapes(run: RunConfig, made: ModelSpec) -> None:
    """Raise UserError if the arguments of a user's own model, such as widths, do not fit each other.

    A sample runs through the model on the meta device. Its size comes from the arguments, or from a similar model of
    the catalogue. A model that reads values is not checked here: its first step fails.
    """
    kwargs = {key: value for key, value in made.kwargs.items() if not key.startswith("_")}
    kwargs |= {key: _SHALLOW for key in FAMILIES[made.class_name].depths.values() if kwargs.get(key)}
    shallow = ModelSpec.model_validate_json(made.model_copy(update={"kwargs": kwargs}).model_dump_json())
    try:
        sample = batch_shape(model_of_arguments(shallow))
    except UserError:
        return
    model = models.outline(shallow)
    try:
        models.take_through(model, models.family(made.class_name), sample)
    except Exception as error:  # whatever a class raises
        if (problem := _shape_problem(run, error)) is not None:
            raise problem from error


_SHALLOW = 2
"""Blocks of each list that the sample runs through: all are alike. HunyuanDiT needs an even number."""


def _check_left_out(run: RunConfig, made: ModelSpec) -> None:
    """Raise UserError if model.init_from has other values for arguments that model.kwargs leaves out.

    The weights would load, but checkpoints and exports would describe another model. A run that resumes keeps its first
    values.
    """
    source = run.model.init_from
    if run.model.class_name is None or source is None or _resumes(run) or not (source / "config.json").is_file():
        return
    had, taken = read_model_config(source / "config.json").kwargs, made.model_dump(mode="json")["kwargs"]
    others = [key for key in had if key not in run.model.kwargs and key in taken and had[key] != taken[key]]
    if others:
        key = others[0]
        more = f", and {len(others) - 1} more of its arguments differ" if len(others) > 1 else ""
        raise UserError(
            f"model.init_from: {source} has {key} {had[key]}, and model.kwargs leaves it to {made.class_name}, which "
            f"has {taken[key]}{more}; set model.path to {source} instead of model.class_name and model.kwargs"
        )


def _packed(spec: ModelSpec) -> int:
    """The side of patches whose pixels are input channels, if the output has one pixel's channels: Qwen-Image's
    patch_size. 1 for Flux, whose out_channels are a patch's."""
    side = spec.kwargs.get("patch_size", 1)
    return side if FAMILIES[spec.class_name].packs and isinstance(side, int) else 1


_SHAPE_ERRORS = re.compile(
    "shapes cannot be multiplied|same reduction dim|Sizes of tensors must match|must match the size of tensor"
    "|Attempting to broadcast a dimension|expected input|is invalid for input of size"
)
"""torch's messages for shapes that do not fit."""


@contextmanager
def shape_errors(run: RunConfig) -> Iterator[None]:
    """Raise a step's shape error as UserError, for a model with the user's own arguments."""
    try:
        yield
    except RuntimeError as error:
        if run.model.name is not None or (problem := _shape_problem(run, error)) is None:
            raise
        raise problem from error


def _shape_problem(run: RunConfig, error: Exception) -> UserError | None:
    """The UserError for a shape error; None for any other error."""
    if not _SHAPE_ERRORS.search(str(error)):
        return None
    key, reason = "model.path" if run.model.path else "model.kwargs", " ".join(str(error).split())
    return UserError(
        f"{key}: a step ends with {reason[:300].rstrip('.')}; "
        "the model's arguments, such as widths, may not fit each other; if they do, this is a bug in bigdit"
    )
