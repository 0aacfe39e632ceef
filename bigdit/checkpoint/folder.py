"""Where checkpoints lie and how they are found: `OUTPUT/checkpoints/step-00000800`, and a file `latest`.

    transformer/       diffusers' format: config.json and safetensors weights in fp32; of LoRA the adapters alone
    transformer_ema/   the same of the moving average, where there is one
    engine/            rank-00000-of-00002.safetensors: masters, optimizer state and average of each process
    state.json         step, model, strategy, versions, and a checksum of every other file

`latest` names the newest whole checkpoint; it moves last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bigdit.errors import UserError
from bigdit.spec import ModelSpec, Strategy

CHECKPOINTS = "checkpoints"
LATEST = "latest"
STATE = "state.json"
TRANSFORMER = "transformer"
TRANSFORMER_EMA = "transformer_ema"
ENGINE = "engine"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk and what its state.json says."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """How many optimizer steps were taken."""
        return int(self.state["step"])

    @property
    def transformer(self) -> Path:
        """Weights that diffusers' from_pretrained loads."""
        return self.folder / TRANSFORMER

    @property
    def transformer_ema(self) -> Path:
        """The moving average of the weights, where one was kept."""
        return self.folder / TRANSFORMER_EMA

    def shard(self, rank: int, world_size: int) -> Path:
        """The training state of one process."""
        return self.folder / ENGINE / f"rank-{rank:05d}-of-{world_size:05d}.safetensors"

    def verify(self, file: Path) -> None:
        """Raise UserError where a file is missing or is not what was written."""
        name = str(file.relative_to(self.folder))
        expected = self.state["checksums"].get(name)
        if expected is None or not file.is_file():
            raise UserError(f"the checkpoint {self.folder} lacks {name}; resume from an earlier one")
        if checksum(file) != expected:
            raise UserError(f"{file} is damaged: its checksum is not the one in {STATE}; resume from an earlier one")

    def verify_all(self, folder: Path) -> None:
        """Raise UserError where a file in one of the checkpoint's folders is not what was written."""
        for file in sorted(folder.iterdir()):
            self.verify(file)

    def check_resumable(self, model: ModelSpec, strategy: Strategy) -> None:
        """Raise UserError with every difference that keeps this run from going on from here."""
        saved_model, saved = self.state["model"], self.state["strategy"]
        problems = [
            f"{self.folder} holds {key} {found!r}, and the run's model has {wanted!r}"
            for key, found, wanted in _differences(saved_model, model.model_dump(mode="json"))
        ]
        wanted_strategy = strategy.model_dump(mode="json")
        problems += [
            f"{self.folder} was trained with {key} {saved.get(key)!r}, and the run asks for {wanted_strategy[key]!r}"
            for key in ("engine", "world_size", "precision", "lora")
            if saved.get(key) != wanted_strategy[key]
        ]
        if (saved.get("ema") is None) != (strategy.ema is None):
            without, with_it = ("the run has none", "holds") if strategy.ema is None else ("the run has one", "lacks")
            problems.append(f"{self.folder} {with_it} a moving average of the weights, and {without} (train.ema)")
        saved_optimizer, optimizer = saved["optimizer"]["name"], strategy.optimizer.name
        if saved_optimizer != optimizer:
            problems.append(f"{self.folder} holds the state of {saved_optimizer}, and optimizer.name is {optimizer}")
        if problems:
            fix = f"choose another output, or start from its weights: model.init_from={self.transformer}"
            raise UserError(*(f"{problem}; {fix}" for problem in problems))


def latest(output: Path) -> Checkpoint | None:
    """The checkpoint that `latest` names, or None before the first. Raises UserError where it is not whole."""
    pointer = output / CHECKPOINTS / LATEST
    if not pointer.is_file():
        return None
    return open_checkpoint(pointer.parent / pointer.read_text().strip())


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint's folder. Raises UserError where its state.json is missing or not readable."""
    try:
        state = json.loads((folder / STATE).read_text())
        kept = {key: state[key] for key in ("step", "model", "strategy", "run", "checksums")}
        return Checkpoint(folder, kept | {"data": state.get("data")})
    except FileNotFoundError:
        raise UserError(f"{folder} is not a checkpoint: it holds no {STATE}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{folder / STATE} is damaged ({error}); resume from an earlier checkpoint") from None


def checksum(file: Path) -> str:
    """xxh3-128 of a file's bytes, as hex."""
    digest = xxhash.xxh3_128()
    with open(file, "rb") as opened:
        while chunk := opened.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, saved, wanted) where two models differ: their class, or the arguments that differ."""
    if saved["class_name"] != wanted["class_name"]:
        return [("class_name", saved["class_name"], wanted["class_name"])]
    old, new = saved["kwargs"], wanted["kwargs"]
    return [
        (key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    ]
