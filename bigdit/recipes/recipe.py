"""Recipes: a run's YAML, the card it is for, and what it took there. Nothing here imports torch."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import NonNegativeInt, PositiveInt

from bigdit.errors import UserError, nearest
from bigdit.strategy import Strict

_FOLDER = Path(__file__).parent
_HEAD = "# recipe: "
MEASURED = _FOLDER / "measured.json"


class For(Strict):
    """The second line of a recipe: a model and a card of the catalogue, and the hub's repository of its weights."""

    model: str
    gpu: str
    repository: str


class Extraction(Strict):
    """`bigdit extract` of so many `samples` of each size on emulated cards, in bytes of one, at the most; `ran_out`:
    encoders were on the card together until memory did not do, and took turns from then on. `emulated_bytes`: what
    torch allocates for as many in the encode phase alone, None where the catalogue has not all encoders."""

    samples: PositiveInt
    peak_allocated_bytes: PositiveInt
    peak_reserved_bytes: PositiveInt
    ran_out: bool
    emulated_bytes: PositiveInt | None


class Saved(Strict):
    """What a run writes to its output, of all processes: bytes of a checkpoint's tensors by what they are, and of its
    files in `engine/`, with the headers; of an export's files. `checkpoints` stay when it ends; so many lie there at
    once before, with the one that is being written. `exports` are those of the whole run."""

    weights_bytes: PositiveInt
    optimizer_bytes: NonNegativeInt
    averages_bytes: NonNegativeInt
    checkpoint_bytes: PositiveInt
    checkpoints: PositiveInt
    checkpoints_at_once: PositiveInt
    export_bytes: PositiveInt
    exports: PositiveInt

    @property
    def most_bytes(self) -> int:
        """Of all that lies there at once, at the most."""
        return self.checkpoints_at_once * self.checkpoint_bytes + self.exports * self.export_bytes


class Took(Strict):
    """Three steps of a recipe at full size on emulated cards, in bytes of one: by torch's allocator, and
    `process_bytes` with all that a CUDA process takes beside it, at least and at most. As the plan for it says, or its
    profile where blocks are swapped, whose number no plan is asked for: `host_bytes` of the machine's memory while
    it saves, `store_bytes` of the features of 100,000 pictures or videos, `hours` of its steps, `encoding_hours` of
    what the encoders compute of these on its cards, None where the catalogue has not all of them, `waiting_bytes` of
    their weights on the host, where they take turns on the card; 0 where all have room. `extraction` was run there
    too, and `saved` is what the steps left. Of stages, three steps of each: bytes of memory are those of the one that
    takes most, features and hours those of all."""

    torch: str
    peak_allocated_bytes: PositiveInt
    peak_reserved_bytes: PositiveInt
    process_bytes: tuple[PositiveInt, PositiveInt]
    usable_bytes: PositiveInt
    host_bytes: NonNegativeInt
    store_bytes: tuple[int, int]
    hours: tuple[float, float]
    encoding_hours: tuple[float, float] | None = None
    waiting_bytes: NonNegativeInt = 0
    extraction: Extraction | None = None
    saved: Saved | None = None


@dataclass(frozen=True)
class Recipe:
    """One recipe: its name is that of its file, its `title` the file's first line."""

    name: str
    title: str
    about: For
    text: str
    took: Took | None

    @cached_property
    def run(self) -> dict[str, Any]:
        """The sections of its YAML."""
        found: dict[str, Any] = yaml.safe_load(self.text)
        return found

    @property
    def stages(self) -> int:
        """How many; a run without is one."""
        return len(self.run.get("stages", [])) or 1

    @property
    def processes(self) -> int:
        """As many as it has cards."""
        return int(self.run["strategy"].get("world_size", 1))

    @property
    def samples(self) -> str:
        """What it is trained on: `pictures` or `videos`."""
        return "videos" if "fps" in self.run["data"] else "pictures"

    @property
    def weights(self) -> str:
        """The folder that its run expects the repository in."""
        return weights_folder(self.about.repository)

    @property
    def commands(self) -> list[str]:
        """From download to samples, in order."""
        file = f"{self.name}.yaml"
        return [
            download(self.about.repository),
            f"bigdit recipe copy {self.name}",
            f"bigdit extract --config {file}",
            f"PYTORCH_ALLOC_CONF=expandable_segments:True bigdit train --config {file}",
            self._sample,
        ]

    @property
    def _sample(self) -> str:
        output = self.run["output"]
        asked = '--caption "a fox in the snow"' if "text" in self.run["encoders"] else "--label 0"
        return f"bigdit sample --checkpoint {output} --out {output}/samples {asked}"


class Beginning(Strict):
    """How long a run goes and how fast it learns, where nobody says."""

    steps: PositiveInt
    warmup_steps: NonNegativeInt
    lr: float


def weights_folder(repository: str) -> str:
    """Where runs expect a repository of the hub."""
    return f"models/{repository.rpartition('/')[2]}"


def download(repository: str) -> str:
    """The command that puts it there."""
    return f"hf download {repository} --local-dir {weights_folder(repository)}"


@cache
def beginning(model: str, *, lora: bool) -> Beginning:
    """As the model's own recipe has it, with LoRA or without; else as most recipes of that kind do."""
    found = []
    for each in map(recipe, names()):
        train, strategy = each.run["train"], each.run["strategy"]
        if each.stages == 1 and ("lora" in strategy) == lora:
            lr = float(strategy["optimizer"]["lr"])
            start = Beginning(steps=train["steps"], warmup_steps=train["warmup_steps"], lr=lr)
            if each.about.model == model:
                return start
            found.append(start.model_dump_json())
    return Beginning.model_validate_json(statistics.mode(found))


def names() -> list[str]:
    """Of all recipes, in order."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def recipe(name: str) -> Recipe:
    """The recipe of this name. Raises UserError where there is none."""
    known = names()
    asked = name.removesuffix(".yaml")
    if asked not in known:
        raise UserError(f"there is no recipe {name!r}; {_instead(asked, known)}")
    text = (_FOLDER / f"{asked}.yaml").read_text(encoding="utf-8")
    title, about, *_ = text.splitlines()
    took = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    return Recipe(
        name=asked,
        title=title.removeprefix("# "),
        about=For.model_validate(yaml.safe_load(about.removeprefix(_HEAD))),
        text=text,
        took=Took.model_validate(took[asked]) if asked in took else None,
    )


def _instead(asked: str, known: list[str]) -> str:
    """The recipes whose names have what was asked in them, such as a card or a model; else the nearest."""
    part = "-".join(asked.casefold().split())
    holding = [name for name in known if part in name]
    return f"did you mean {', '.join(holding)}?" if part and holding else nearest(asked, known)
