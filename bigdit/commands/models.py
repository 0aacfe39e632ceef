"""`bigdit models`: diffusion transformers of the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigdit import log
from bigdit.errors import UserError
from bigdit.units import count

if TYPE_CHECKING:
    from rich.table import Table

    from bigdit.catalog.models import CatalogModel


def run(
    containing: Annotated[
        str | None,
        typer.Option(
            "--filter", metavar="TEXT", help="Only models with TEXT in their name, alias, repository or class."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with every field.")] = False,
) -> None:
    """List known diffusion transformers, and which of them can be planned and trained."""
    from bigdit.catalog.models import models, no_model

    asked = (containing or "").casefold()
    found = [m for m in models() if asked in _words(m)]
    if not found:
        raise UserError(f"no model has {containing!r} in its name, alias, repository or class{no_model(asked)}")
    if as_json:
        log.emit_json([_fields(m) for m in found])
    else:
        log.out.print(_table(found))


def _words(model: CatalogModel) -> str:
    from bigdit.catalog.models import model_aliases, repositories

    names = (model.name, model.spec.class_name, *model_aliases(model.name), *repositories(model.name))
    return " ".join(names).casefold()


def _fields(model: CatalogModel) -> dict[str, Any]:
    from bigdit.catalog.models import model_aliases, repositories

    return model.model_dump(mode="json") | {
        "aliases": model_aliases(model.name),
        "repositories": repositories(model.name),
        "plannable": model.plannable,
        "obstacle": model.obstacle,
        "trainable": model.trainable,
        "training_obstacle": model.training_obstacle,
        "extractable": model.extractable,
        "extract_obstacle": model.extract_obstacle,
        "text_pipeline": model.text_pipeline,
    }


_ELSEWHERE = "train*"
_PURPOSES = {
    "train": "for train: can be planned and trained",
    _ELSEWHERE: f"for {_ELSEWHERE}: `bigdit extract` cannot encode its text; encode it elsewhere",
    "plan": "for plan: can only be planned",
}
"""What can be done with a model, in the column and in full."""


def _purpose(model: CatalogModel) -> str | None:
    """What can be done with a model."""
    if model.trainable:
        return "train" if model.extractable else _ELSEWHERE
    return "plan" if model.plannable else None


def _native_latents(model: CatalogModel) -> tuple[int, ...] | None:
    from bigdit.catalog.models import latent_shape

    side, clip = model.resolution, model.clip
    if clip is not None:
        return latent_shape(model, clip.height, clip.width, clip.frames)
    return None if side is None else latent_shape(model, side, side)


def _table(found: list[CatalogModel]) -> Table:
    from bigdit.report.tables import DASH, cell, table

    columns = ("model", "params", "blocks", "px", "latents", "text", "for")
    made = table("Diffusion transformers", columns, numeric=("params", "blocks", "px", "latents", "text"))
    for m in found:
        text = m.text
        made.add_row(
            m.name,
            DASH if m.params is None else count(m.params),
            "+".join(str(length) for _, length in m.block_lists),
            cell(m.resolution),
            cell(_native_latents(m)),
            DASH if text is None else f"{text.tokens or '?'}×{text.dim or '?'}",
            _purpose(m) or DASH,
        )
    shown = [_PURPOSES[each] for each in _PURPOSES if each in {_purpose(m) for m in found}]
    why = ["reasons: --json"] if {_purpose(m) for m in found} != {"train"} else []
    made.caption = "\n".join([f"{len(found)} model{'' if len(found) == 1 else 's'}", *shown, *why])
    return made
