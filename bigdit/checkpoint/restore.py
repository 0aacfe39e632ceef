"""Checks whether a run can resume from a checkpoint, and restores it, for any engine and number of processes."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bigdit import models
from bigdit.catalog.resolve import read_model_config
from bigdit.checkpoint.folder import (
    STATE,
    Checkpoint,
    Peers,
    Saved,
    check_exported,
    latest,
    open_checkpoint,
    verify,
)
from bigdit.config.load import parse_run
from bigdit.config.run import RunConfig
from bigdit.documents import differences, read_json, written
from bigdit.engines import Ema, Engine
from bigdit.engines.state import EMA, SavedSlice, make_state, restore_numbers, state_slices
from bigdit.errors import UserError
from bigdit.models.lora_files import FILE as ADAPTERS
from bigdit.models.lora_files import PEFT_CONFIG, PEFT_FILE, TEXT_ENCODERS
from bigdit.objective_spec import ObjectiveSpec, learned
from bigdit.strategy import ADAPTERS as KINDS
from bigdit.strategy import AdapterKind, LoraSpec, ModelSpec, OptimizerSpec, Strategy
from bigdit.units import MIB, how_many, in_groups


def restore(checkpoint: Checkpoint, engine: Engine, peers: Peers, ema: Ema | None = None) -> None:
    """Restore masters, optimizer state and EMA, on all processes.

    The files were verified before. Raises UserError if they hold the state of another model or optimizer.
    """
    reader = HuggingFaceStorageReader(str(checkpoint.engine))
    saved = reader.read_metadata().state_dict_metadata.keys()
    rank = peers.world.rank
    make_state(engine, saved, rank)
    wanted = state_slices(engine, ema, rank)
    filled = {name: place for name, place in wanted.items() if name in saved}
    for name in sorted(wanted.keys() - saved):
        if name.startswith("state.") and not wanted[name].number:
            wanted[name].tensor.zero_()  # its parameter had no gradient, but its master has other parameters too
        elif not wanted[name].number:
            raise UserError(f"{checkpoint.folder} does not hold {name}: it is of another model or optimizer")
    _load(checkpoint, filled, reader, peers)
    restore_numbers(engine, filled)
    engine.publish()
    if ema is not None:
        ema.updates = checkpoint.state["updates"]


def _with_adapters(source: Path) -> Path | None:
    """The folder with LoRA adapters: `source`, or the one below an export."""
    within = (source, source / "transformer")
    return next((each for each in within if any((each / name).is_file() for name in (ADAPTERS, PEFT_FILE))), None)


def check_whole(source: Path) -> None:
    """Raise UserError if a checkpoint or an export holds only LoRA adapters or a ControlNet, and no whole model, or if
    `source` is the output of a run."""
    base = ""
    if (source / STATE).is_file():
        state = open_checkpoint(source).state
        if state["strategy"].get("controlnet") is not None:
            raise UserError(f"{source} holds only a ControlNet; its base is {state['run']['model']['init_from']}")
        if state["strategy"].get("lora") is None:
            return
        base = f", {state['run']['model']['init_from']},"
    elif _with_adapters(source) is None:
        last, _ = latest(source) if source.is_dir() else (None, [])
        if last is None:
            return
        check_whole(last.folder)
        raise UserError(f"{source} is the output of a run; name a checkpoint of it, such as {last.folder}")
    kind = _kind_of_adapters(source)
    if kind != "lora":
        raise UserError(
            f"{source} holds only {KINDS[kind]} adapters; merge them into the weights they are for{base} and set "
            "model.init_from to these"
        )
    raise UserError(
        f"{source} holds only LoRA adapters; set model.init_from to the weights they are for{base} and "
        f"model.lora_from to {source}"
    )


def _kind_of_adapters(source: Path) -> AdapterKind:
    """The kind of the adapters in a checkpoint, an export or a folder of peft."""
    try:
        if (source / STATE).is_file():
            named = open_checkpoint(source).state["strategy"]["lora"]["kind"]
        else:
            named = str(read_json((_with_adapters(source) or source) / PEFT_CONFIG)["peft_type"]).lower()
    except (OSError, ValueError, KeyError, TypeError):
        named = "lora"  # diffusers' file
    return next((kind for kind in KINDS if kind == named), "lora")


_OF_TEXT = re.compile(r"(text_encoder|text_model|lora_te|bundle_emb\.)")
"""Names of text encoders' adapters, and of the embeddings that OneTrainer puts beside them."""


def load_adapters(model: nn.Module, spec: ModelSpec, lora: LoraSpec, source: Path) -> list[str]:
    """Fill new adapters from `source` (model.lora_from): a checkpoint, an export, or a safetensors file.

    Returns lines to log. Raises UserError if it holds no adapters of this model, or adapters of other layers.
    """
    try:
        tensors, config = _adapter_tensors(source)
        of_text = {name for name in tensors if _OF_TEXT.match(name)}
        mine = {name: tensor for name, tensor in tensors.items() if name not in of_text}
        notices = models.start_adapters(model, lora, models.read_adapters(spec, mine, config))
        if of_text and lora.text_encoders:
            if hasattr(model, TEXT_ENCODERS):  # not while a run is only checked
                texts = {name: tensors[name] for name in sorted(of_text)}
                notices += models.start_text_adapters(model, lora, texts, config)
            return notices
        left = f"model.lora_from: left out: {how_many(len(of_text), 'tensor')} of text encoders"
        return [*notices, *([left] if of_text else [])]
    except UserError as error:
        raise UserError(*(f"model.lora_from: {source}: {problem}" for problem in error.problems)) from None


def _adapter_tensors(source: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of adapters, and their peft configuration."""
    if (source / STATE).is_file():
        found = open_checkpoint(source)
        lora = found.state["strategy"].get("lora")
        if lora is None:
            raise UserError("it holds no LoRA, but a whole model; name it in model.init_from")
        if lora.get("pissa"):
            raise UserError("its LoRA was initialised by PiSSA, over other weights; name its export instead")
        verify(found)
        tensors = {name: torch.empty(tuple(shape)) for name, shape in found.state["parameters"].items()}
        load_used(found, tensors)
        spec = LoraSpec.model_validate(lora)
        for name in (name for name in tensors if ".lora_B." in name):
            tensors[name] *= spec.scale(tensors[name].shape[1])
        return tensors, {}
    if source.is_dir():
        folder = _with_adapters(source)
        if folder is None:
            check_exported(source)
            raise UserError(_instead_of_lora(source))
        check_exported(folder)
        source = folder / (ADAPTERS if (folder / ADAPTERS).is_file() else PEFT_FILE)
    problem = models.not_safetensors(source)
    if problem is not None:
        raise UserError(problem)
    beside = source.with_name(PEFT_CONFIG)  # peft's own file has no alpha
    with safe_open(source, "pt") as file:
        try:
            described = dict(json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}")))
            if source.name == PEFT_FILE and beside.exists():
                described |= read_json(beside)
        except (OSError, ValueError, TypeError, RecursionError):
            raise UserError(f"its lora_adapter_metadata or {PEFT_CONFIG} is no JSON of peft") from None
        config = {key.removeprefix("transformer."): value for key, value in described.items()}
        return {name: file.get_tensor(name) for name in file.keys()}, config  # noqa: SIM118


def _instead_of_lora(source: Path) -> str:
    """What a folder without LoRA holds, and what to name."""
    last, _ = latest(source)
    if last is None:
        within = (source, source / "transformer")
        whole = next((each for each in within if any(each.glob("diffusion_pytorch_model*"))), None)
        if whole is None:
            return f"it holds no {ADAPTERS}; name a checkpoint (checkpoints/STEP of an output) or an export"
    elif last.state["strategy"].get("lora") is None:
        whole = last.folder
    elif (kind := _kind_of_adapters(last.folder)) != "lora":
        return f"it is of {KINDS[kind]}, and LoRA was expected; merge it into the weights of model.init_from"
    else:
        return f"it holds no {ADAPTERS}; name a checkpoint of it, such as {last.folder}"
    return f"it holds no LoRA, but a whole model; name {whole} in model.init_from"


def check_start(spec: ModelSpec, source: Path) -> None:
    """Raise UserError as `load_model` does, from names and shapes alone."""
    with _start(spec, source):
        check_whole(source)
        if not (source / STATE).is_file():
            check_exported(source, by_content=False)
            models.check_folder(spec, source)
            return
        found = {name: math.prod(shape) for name, shape in open_checkpoint(source).state["parameters"].items()}
        for name, parameter in trained(models.outline(spec)).items():
            if (held := found.get(name, 0)) != parameter.numel():
                misfit = f"it holds {held} elements of {name}, and this run has {parameter.numel()}"
                raise UserError(f"{source} cannot be read: {misfit}")


def load_model(spec: ModelSpec, source: Path, *, dtype: torch.dtype) -> nn.Module:
    """The model in CPU memory with the weights in `source` (model.init_from): a diffusers folder, or a checkpoint.

    Raises UserError if it is neither, is damaged, or holds another model, with the differences.
    """
    with _start(spec, source):
        check_whole(source)
        if not (source / STATE).is_file():
            check_exported(source)
            return models.load(spec, source, dtype=dtype)
        found = open_checkpoint(source)
        verify(found)
        model = models.skeleton(spec, dtype=dtype)
        load_weights(found, model)
        return model


@contextlib.contextmanager
def _start(spec: ModelSpec, source: Path) -> Iterator[None]:
    """Adds the key, and how the model in `source` differs, to errors."""
    try:
        yield
    except UserError as error:
        others = _others(spec, source)
        raise UserError(*(f"model.init_from: {problem}{others}" for problem in error.problems)) from None


def _others(spec: ModelSpec, source: Path) -> str:
    """How the model in `source` differs from `spec`."""
    try:
        had = open_checkpoint(source).state["model"] if (source / STATE).is_file() else None
        had = had or read_model_config(source / "config.json").model_dump(mode="json")
    except UserError:
        return ""
    if had["class_name"] != spec.class_name:
        return f"; they are of {had['class_name']}"
    here = spec.model_dump(mode="json")["kwargs"]
    others = [f"{key} {each}, here {here[key]}" for key, each in had["kwargs"].items() if here.get(key, each) != each]
    return f"; they have {' and '.join(others[:3])}" if others else ""


@torch.no_grad()
def load_weights(checkpoint: Checkpoint, model: nn.Module, *, ema: bool = False) -> None:
    """Fill the trained parameters (with adapters only theirs), rounded to their dtypes; `ema`: from the EMA.

    Raises UserError if the checkpoint holds another model.
    """
    if ema:
        load_kind(checkpoint, EMA, trained(model))
    else:
        load_used(checkpoint, trained(model))


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_kind(checkpoint: Saved, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill parameters by name with their saved `master`s or EMAs."""
    load_tensors(checkpoint, {f"{kind}.{name}": tensor for name, tensor in tensors.items()})


def load_used(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill parameters by name with the weights for samples and exports: the masters, or schedule-free's average.

    Source: AdamWScheduleFree.eval, schedulefree 1.4: x = y + (1 − 1/β1)(z − y).
    """
    optimizer = OptimizerSpec.model_validate(checkpoint.state["strategy"]["optimizer"])
    if optimizer.name != "adamw_schedulefree":
        load_kind(checkpoint, "master", tensors)
        return
    saved = HuggingFaceStorageReader(str(checkpoint.engine)).read_metadata().state_dict_metadata
    for names in few_at_once(tensors):
        kinds = [(kind, name) for name in names for kind in ("master", "state.z") if f"{kind}.{name}" in saved]
        read = {f"{kind}.{name}": torch.empty(tensors[name].shape) for kind, name in kinds}
        load_tensors(checkpoint, read)
        for name in names:
            trained_on = read[f"master.{name}"]
            z = read.get(f"state.z.{name}", trained_on)  # missing for a parameter without a step
            tensors[name].copy_(trained_on.lerp_(z, 1 - 1 / optimizer.betas[0]))


_AT_ONCE = 64 * MIB // 8
"""The most elements that are summed together; a file's header is read once for them."""


def few_at_once(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """The names of tensors, in groups that are small enough to be summed together."""
    return in_groups(tensors, lambda name: tensors[name].numel(), _AT_ONCE)


def load_tensors(checkpoint: Saved, tensors: dict[str, torch.Tensor]) -> None:
    """Fill whole tensors by their saved names. Raises UserError if one is missing."""
    wanted = {name: SavedSlice(tensor.detach().view(-1), 0, tensor.numel()) for name, tensor in tensors.items()}
    _load(checkpoint, wanted, HuggingFaceStorageReader(str(checkpoint.engine)), Peers())


def _load(checkpoint: Saved, wanted: dict[str, SavedSlice], reader: HuggingFaceStorageReader, peers: Peers) -> None:
    try:
        dcp.load(
            dict(wanted),
            storage_reader=reader,
            planner=LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=peers.group,
            no_dist=peers.group is None,
        )
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, KeyboardInterrupt):  # torch wraps it like errors
            raise first from None
        raise UserError(f"{checkpoint.folder} cannot be read: {first}") from None


class LoadPlanner(DefaultLoadPlanner):
    """Fills each slice from the saved slices of the same name, whatever their offsets."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, place in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            found = saved.size[0] if isinstance(saved, TensorStorageMetadata) else 0
            if found != place.numel:
                raise UserError(f"it holds {found} elements of {name}, and this run has {place.numel}")
            wanted = ChunkStorageMetadata(torch.Size([place.offset]), torch.Size([place.tensor.numel()]))
            parts = create_read_items_for_chunk_list(name, saved, [wanted])  # type: ignore[arg-type]  # has elements
            if sum(part.lengths[0] for part in parts) != place.tensor.numel():
                raise UserError(f"some of the {found} elements of {name} are in none of its files")
            items += parts
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn].tensor
        return found


UNTRAINED = (
    # Reading, saving and monitoring.
    *("output", "plan", "trackers", "samples", "validation", "stages"),
    *("train.checkpoint_every", "train.keep_checkpoints", "train.keep_every", "train.export_every"),
    *("train.snapshot_every", "train.grace", "train.timeout", "train.most_skipped_steps"),
    "train.compare_replicas_every",
    *("data.part_size", "data.workers", "data.read_threads", "data.reader", "data.remote_cache"),
    *("encoders.device", "encoders.batch_size", "strategy.optimizer.implementation", "strategy.ema.device"),
    # Models and images are compared by their content.
    *("model.name", "model.path", "model.class_name", "model.kwargs", "data.images", "train.epochs", "train.seed"),
)
"""Keys that do not change what is trained. `train.steps` does if the learning rate depends on it."""

_TRAINED = ("optimizer", "gradient_clipping", "precision", "ema", "lora", "controlnet", "features")
"""Keys of a strategy that change what is trained."""

_SHOWN = 60
"""Characters of a value that a message shows."""

_ANY: TypeAdapter[ObjectiveSpec] = TypeAdapter(ObjectiveSpec)


def check_resumable(checkpoint: Checkpoint, model: ModelSpec, strategy: Strategy) -> None:
    """Raise UserError with all differences because of which this run cannot resume from the checkpoint."""
    saved_model, was = checkpoint.state["model"], Strategy.model_validate(checkpoint.state["strategy"])
    of_model = [
        f"{checkpoint.folder} holds {key} {found!r}, and the run's model has {wanted!r}; choose another output"
        for key, found, wanted in _model_differences(saved_model, model.model_dump(mode="json"))
    ]
    had, asked = (each.model_dump(mode="json", include={"precision", "lora", "controlnet"}) for each in (was, strategy))
    problems = [
        f"{checkpoint.folder} was trained with strategy.{key} {written(found)}, and the run asks for {written(wanted)}"
        for key, found, wanted in differences(had, asked)
    ]
    if (was.ema is None) != (strategy.ema is None):
        without, with_it = ("the run has none", "holds") if strategy.ema is None else ("the run has one", "lacks")
        problems.append(f"{checkpoint.folder} {with_it} an EMA of the weights, and {without} (strategy.ema)")
    elif strategy.ema is not None and was.ema is not None and was.ema.powers != strategy.ema.powers:
        problems.append(
            f"{checkpoint.folder} holds an EMA with strategy.{was.ema.profile}, and the run asks for "
            f"strategy.{strategy.ema.profile}: they weigh past steps differently"
        )
    saved_optimizer, optimizer = was.optimizer.name, strategy.optimizer.name
    if saved_optimizer != optimizer:
        problems.append(
            f"{checkpoint.folder} holds the state of {saved_optimizer}, and strategy.optimizer.name is {optimizer}"
        )
    laid, now = layout(was), layout(strategy)
    if checkpoint.state["local"] and laid != now:
        problems.append(
            f"{checkpoint.folder} holds the state of {saved_optimizer} in blocks or factors for {laid}, and "
            f"the run is {now}"
        )
    if of_model or problems:
        raise UserError(*of_model, *(f"{problem}; {_elsewhere(checkpoint)}" for problem in problems))


def check_objective(checkpoint: Checkpoint, objective: ObjectiveSpec) -> None:
    """Raise UserError if the run's objective has another prediction or other noise than the checkpoint's."""
    try:
        before = _ANY.validate_python(checkpoint.state["run"]["objective"])  # newer keys get their defaults
    except (KeyError, ValidationError):
        raise UserError(f"{checkpoint.folder} is damaged: its run.objective is not valid") from None
    had, asked = learned(before), learned(objective)
    key = next((key for key in had | asked if had.get(key) != asked.get(key)), None)
    if key is not None:
        raise UserError(
            f"{checkpoint.folder} was trained with objective.{key} {had.get(key)}, and the run asks for "
            f"{asked.get(key)}; set objective.{key} to {had.get(key)}, or {_elsewhere(checkpoint)}"
        )


def _elsewhere(checkpoint: Checkpoint) -> str:
    """Advice for a run that cannot resume from this checkpoint."""
    lora, controlnet = (checkpoint.state["strategy"].get(key) for key in ("lora", "controlnet"))
    if controlnet is not None or (lora is not None and (lora.get("kind", "lora") != "lora" or lora.get("pissa"))):
        return "choose another output"  # model.lora_from reads plain LoRA only
    if lora is not None:
        base = checkpoint.state["run"]["model"]["init_from"]
        return (
            f"choose another output; there model.init_from={base} model.lora_from={checkpoint.folder} starts from "
            "these adapters"
        )
    return f"choose another output; there model.init_from={checkpoint.folder} starts from these weights"


def changed_since(checkpoint: Checkpoint, run: RunConfig) -> list[str]:
    """A line for each key that changes what is trained and differs from the checkpoint's run.

    The run's objective must be resolved, as the checkpoint's is. Keys that are checked elsewhere are left out.
    """
    saved = parse_run(checkpoint.state["run"], str(checkpoint.folder))
    before, now = _trained_by(saved), _trained_by(run)
    ignored = UNTRAINED if run.train.lr_schedule != "constant" else {*UNTRAINED, "train.steps"}
    return [
        f"{checkpoint.folder} was trained with {key} {written(found)[:_SHOWN]}, and resumes with "
        f"{written(wanted)[:_SHOWN]}"
        for key, found, wanted in differences(before, now)
        if not any(f"{key}.".startswith(f"{each}.") for each in ignored)
    ]


def _trained_by(run: RunConfig) -> dict[str, Any]:
    document = run.model_dump(mode="json")
    return document | {"strategy": {key: document["strategy"][key] for key in _TRAINED}}


def layout(strategy: Strategy) -> str:
    """How masters are distributed over processes, for people."""
    if strategy.engine == "single":
        return "single"
    stage = "" if strategy.zero_stage is None else f" ZeRO-{strategy.zero_stage}"
    copies = f" in {strategy.dp_replicate} copies" if strategy.dp_replicate > 1 else ""
    processes = how_many(strategy.world_size, "process")
    flat = strategy.engine == "deepspeed" and strategy.optimizer.decayed != "all"
    apart = ", what decays apart from what does not" if flat else ""
    return f"{strategy.engine}{stage} on {processes}{copies}{apart}"


def _model_differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, saved, wanted) of what differs between two models: their class, else their arguments."""
    if saved["class_name"] != wanted["class_name"]:
        return [("class_name", saved["class_name"], wanted["class_name"])]
    return list(differences(saved["kwargs"], wanted["kwargs"]))
