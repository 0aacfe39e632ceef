"""Recipes: a run's YAML, the card it is for, and what it took there. Nothing here imports torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import NonNegativeInt, PositiveInt

from bigdit.errors import UserError, nearest
from bigdit.spec import Strict

_FOLDER = Path(__file__).parent
_HEAD = "# recipe: "
MEASURED = _FOLDER / "measured.json"


class For(Strict):
    """The second line of a recipe: a model and a card of the catalogue, and the hub's repository of its weights."""

    model: str
    gpu: str
    repository: str


class Took(Strict):
    """Three steps of a recipe at full size on an emulated card, in bytes: by torch's allocator, and `process_bytes`
    with all that a CUDA process takes beside it, at least and at most. `host_bytes` of the machine's memory while it
    saves, `store_bytes` of the features of 100,000 pictures, `hours` of its steps: as the plan for it says."""

    torch: str
    peak_allocated_bytes: PositiveInt
    peak_reserved_bytes: PositiveInt
    process_bytes: tuple[PositiveInt, PositiveInt]
    usable_bytes: PositiveInt
    host_bytes: NonNegativeInt
    store_bytes: tuple[int, int]
    hours: tuple[float, float]


@dataclass(frozen=True)
class Recipe:
    """One recipe: its name is that of its file, its `title` the file's first line."""

    name: str
    title: str
    about: For
    text: str
    took: Took | None

    @property
    def weights(self) -> str:
        """The folder that its run expects the repository in."""
        return f"models/{self.about.repository.rpartition('/')[2]}"

    @property
    def commands(self) -> list[str]:
        """From download to samples, in order."""
        file, output = f"{self.name}.yaml", yaml.safe_load(self.text)["output"]
        return [
            f"hf download {self.about.repository} --local-dir {self.weights}",
            f"bigdit recipe copy {self.name}",
            f"bigdit extract --config {file}",
            f"PYTORCH_ALLOC_CONF=expandable_segments:True bigdit train --config {file}",
            f'bigdit sample --checkpoint {output} --out {output}/samples --caption "a fox in the snow"',
        ]


def names() -> list[str]:
    """Of all recipes, in order."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def recipe(name: str) -> Recipe:
    """The recipe of this name. Raises UserError where there is none."""
    known = names()
    asked = name.removesuffix(".yaml")
    if asked not in known:
        raise UserError(f"there is no recipe {name!r}; {nearest(asked, known)}")
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
