"""Recipes: runs that fit known GPUs, one YAML each, with their memory on emulated GPUs. Imports no torch."""

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
    """The second line of a recipe: model and GPU of the catalogue, and the hub's repository of its weights."""

    model: str
    gpu: str
    repository: str


class Extraction(Strict):
    """The memory of `bigdit extract` for `samples` of each size: peak bytes of one emulated GPU.

    `ran_out`: the encoders did not fit together, and took turns. `emulated_bytes`: torch's allocations for the same
    samples in the encode phase; None if the catalogue lacks an encoder.
    """

    samples: PositiveInt
    peak_allocated_bytes: PositiveInt
    peak_reserved_bytes: PositiveInt
    ran_out: bool
    emulated_bytes: PositiveInt | None


class DiskNeed(Strict):
    """What all processes of a run write to its output.

    Bytes of a checkpoint's tensors by kind, of its files, and of an export's files. `checkpoints`: those that are kept;
    `checkpoints_at_once`: those that exist while one is written. `exports`: of the whole run.
    """

    weights_bytes: PositiveInt
    optimizer_bytes: NonNegativeInt
    ema_bytes: NonNegativeInt
    checkpoint_bytes: PositiveInt
    checkpoints: PositiveInt
    checkpoints_at_once: PositiveInt
    export_bytes: PositiveInt
    exports: PositiveInt

    @property
    def most_bytes(self) -> int:
        """The most bytes that exist at once."""
        return self.checkpoints_at_once * self.checkpoint_bytes + self.exports * self.export_bytes


class Took(Strict):
    """What three steps of a recipe needed at full size on emulated GPUs; bytes of memory are of one GPU.

    Peaks are of torch's allocator; `process_bytes` (low, high) adds non-torch memory. From the plan, or from the
    profile with swapped blocks: `host_bytes`, CPU memory of a machine while it saves; `store_bytes` of the cache for
    100,000 samples; `hours` of training; `encoding_hours`, None if the catalogue lacks an encoder; `waiting_bytes`, CPU
    memory of encoders that take turns on the GPU, 0 if all fit. With stages, memory is of the largest stage, cache and
    hours are of all.
    """

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
    saved: DiskNeed | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe. `name`: of its file; `title`: the file's first line."""

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
        """The number of stages; 1 for a run without stages."""
        return len(self.run.get("stages", [])) or 1

    @property
    def processes(self) -> int:
        """Processes, one for each GPU."""
        return int(self.run["strategy"].get("world_size", 1))

    @property
    def samples(self) -> str:
        """`images` or `videos`."""
        return "videos" if "fps" in self.run["data"] else "images"

    @property
    def weights(self) -> str:
        """The folder where its run expects the repository."""
        return weights_folder(self.about.repository)

    @property
    def commands(self) -> list[str]:
        """The commands from download to samples, or to an export if samples need another model."""
        file = f"{self.name}.yaml"
        return [
            download(self.about.repository),
            f"bigdit recipe copy {self.name}",
            f"bigdit extract --config {file}",
            f"PYTORCH_ALLOC_CONF=expandable_segments:True bigdit train --config {file}",
            self._sample,
        ]

    @property
    def generates(self) -> bool:
        """Whether the trained model alone can generate from noise."""
        return "t_range" not in self.run.get("objective", {})

    @property
    def _sample(self) -> str:
        output = self.run["output"]
        if not self.generates:
            return f"bigdit export --checkpoint {output} --out {output}/export"
        asked = '--caption "a fox in the snow"' if "text" in self.run["encoders"] else "--label 0"
        asked += " --image fox.png" if {"references", "fill"} & self.run["data"].keys() else ""
        return f"bigdit sample --checkpoint {output} --out {output}/samples {asked}"


class Beginning(Strict):
    """The default steps, warm-up and learning rate of a run."""

    steps: PositiveInt
    warmup_steps: NonNegativeInt
    lr: float


def weights_folder(repository: str) -> str:
    """The folder where runs expect a repository of the hub."""
    return f"models/{repository.rpartition('/')[2]}"


def download(repository: str) -> str:
    """The command that downloads a repository to `weights_folder`."""
    return f"hf download {repository} --local-dir {weights_folder(repository)}"


@cache
def beginning(model: str, *, lora: bool) -> Beginning:
    """The values of the model's own recipe, with or without LoRA; else the most common values of such recipes."""
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
    """The names of all recipes, in order."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def recipe(name: str) -> Recipe:
    """The recipe of this name. Raises UserError if there is none."""
    known = names()
    asked = name.removesuffix(".yaml")
    if asked not in known:
        raise UserError(f"there is no recipe {name!r}; {_hint(asked, known)}")
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


def _hint(asked: str, known: list[str]) -> str:
    """A hint with the recipes whose names contain `asked`, such as a GPU or a model; else with the nearest names."""
    part = "-".join(asked.casefold().split())
    holding = [name for name in known if part in name]
    return f"did you mean {', '.join(holding)}?" if part and holding else nearest(asked, known)
