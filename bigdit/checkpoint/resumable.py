"""Whether a run can resume from a checkpoint: with the same numbers, on any engine and number of processes."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from bigdit.checkpoint.folder import Checkpoint
from bigdit.config.load import parse_run
from bigdit.config.run import RunConfig
from bigdit.documents import differences, written
from bigdit.errors import UserError
from bigdit.objective_spec import ObjectiveSpec, learned
from bigdit.strategy import ModelSpec, Strategy
from bigdit.units import how_many

BESIDE = (
    # How it is read, saved and monitored.
    *("output", "plan", "trackers", "samples", "validation", "stages"),
    *("train.checkpoint_every", "train.keep_checkpoints", "train.keep_every", "train.export_every"),
    *("train.snapshot_every", "train.grace", "train.timeout", "train.most_skipped_steps"),
    *("data.part_size", "data.workers", "data.read_threads", "data.reader", "data.remote_cache"),
    *("encoders.device", "encoders.batch_size", "strategy.optimizer.implementation", "strategy.ema.device"),
    # What of another model, or other pictures, is refused or said by what they are.
    *("model.name", "model.path", "model.class_name", "model.kwargs", "data.images", "train.epochs", "train.seed"),
)
"""Keys that change nothing of what is trained; all others do. `train.steps` does where the learning rate depends on
it."""

_TRAINED = ("optimizer", "gradient_clipping", "precision", "ema", "lora", "features")
"""Keys of a strategy that change what is trained; the rest is how it is stepped."""

_MOST = 60
"""Letters of a value that a message shows."""

_ANY: TypeAdapter[ObjectiveSpec] = TypeAdapter(ObjectiveSpec)


def check_resumable(checkpoint: Checkpoint, model: ModelSpec, strategy: Strategy) -> None:
    """Raise UserError with every difference that keeps this run from resuming here."""
    saved_model, was = checkpoint.state["model"], Strategy.model_validate(checkpoint.state["strategy"])
    of_model = [
        f"{checkpoint.folder} holds {key} {found!r}, and the run's model has {wanted!r}; choose another output"
        for key, found, wanted in _differences(saved_model, model.model_dump(mode="json"))
    ]
    had, asked = (each.model_dump(mode="json", include={"precision", "lora"}) for each in (was, strategy))
    problems = [
        f"{checkpoint.folder} was trained with strategy.{key} {written(found)}, and the run asks for {written(wanted)}"
        for key, found, wanted in differences(had, asked)
    ]
    if (was.ema is None) != (strategy.ema is None):
        without, with_it = ("the run has none", "holds") if strategy.ema is None else ("the run has one", "lacks")
        problems.append(f"{checkpoint.folder} {with_it} a moving average of the weights, and {without} (strategy.ema)")
    elif strategy.ema is not None and was.ema is not None and was.ema.powers != strategy.ema.powers:
        problems.append(
            f"{checkpoint.folder} averages with strategy.{was.ema.profile}, and the run asks for "
            f"strategy.{strategy.ema.profile}: what was taken in counts otherwise"
        )
    saved_optimizer, optimizer = was.optimizer.name, strategy.optimizer.name
    if saved_optimizer != optimizer:
        problems.append(
            f"{checkpoint.folder} holds the state of {saved_optimizer}, and strategy.optimizer.name is {optimizer}"
        )
    laid, now = layout(was), layout(strategy)
    if checkpoint.state["local"] and laid != now:
        problems.append(
            f"{checkpoint.folder} holds the state of {saved_optimizer} in blocks or factors as {laid} made them, and "
            f"the run is {now}"
        )
    if of_model or problems:
        raise UserError(*of_model, *(f"{problem}; {_elsewhere(checkpoint)}" for problem in problems))


def check_objective(checkpoint: Checkpoint, objective: ObjectiveSpec) -> None:
    """Raise UserError where the run's objective would predict something else than was learned, or from other noise."""
    try:
        before = _ANY.validate_python(checkpoint.state["run"]["objective"])  # keys are added, with their defaults
    except (KeyError, ValidationError):
        raise UserError(f"{checkpoint.folder} is damaged: its run.objective is none") from None
    had, asked = learned(before), learned(objective)
    key = next((key for key in had | asked if had.get(key) != asked.get(key)), None)
    if key is not None:
        raise UserError(
            f"{checkpoint.folder} was trained with objective.{key} {had.get(key)}, and the run asks for "
            f"{asked.get(key)}; set objective.{key} to {had.get(key)}, or {_elsewhere(checkpoint)}"
        )


def _elsewhere(checkpoint: Checkpoint) -> str:
    """What a run can do that cannot resume here. Adapters alone are no weights to start from."""
    if checkpoint.state["strategy"].get("lora") is not None:
        return "choose another output, where adapters start anew"
    return f"choose another output; there model.init_from={checkpoint.folder} starts from these weights"


def changed_since(checkpoint: Checkpoint, run: RunConfig) -> list[str]:
    """How the run differs from the checkpoint's in what is trained, a line a key. Its objective is resolved as the
    checkpoint's is. Keys that are checked elsewhere are left out."""
    before, now = (_trained_by(each) for each in (_run_of(checkpoint), run))
    beside = BESIDE if run.train.lr_schedule != "constant" else {*BESIDE, "train.steps"}
    return [
        f"{checkpoint.folder} was trained with {key} {written(found)[:_MOST]}, and goes on with "
        f"{written(wanted)[:_MOST]}"
        for key, found, wanted in differences(before, now)
        if not any(f"{key}.".startswith(f"{each}.") for each in beside)
    ]


def _trained_by(run: RunConfig) -> dict[str, Any]:
    document = run.model_dump(mode="json")
    return document | {"strategy": {key: document["strategy"][key] for key in _TRAINED}}


def _run_of(checkpoint: Checkpoint) -> RunConfig:
    return parse_run(checkpoint.state["run"], str(checkpoint.folder))


def layout(strategy: Strategy) -> str:
    """How masters lie on the processes, for people."""
    if strategy.engine == "single":
        return "single"
    stage = "" if strategy.zero_stage is None else f" ZeRO-{strategy.zero_stage}"
    copies = f" in {strategy.dp_replicate} copies" if strategy.dp_replicate > 1 else ""
    processes = how_many(strategy.world_size, "process")
    flat = strategy.engine == "deepspeed" and strategy.optimizer.decayed != "all"
    apart = ", what decays apart from what does not" if flat else ""
    return f"{strategy.engine}{stage} on {processes}{copies}{apart}"


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, saved, wanted) where two models differ: their class, or the arguments that differ."""
    if saved["class_name"] != wanted["class_name"]:
        return [("class_name", saved["class_name"], wanted["class_name"])]
    old, new = saved["kwargs"], wanted["kwargs"]
    return [
        (key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    ]
