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
    """List known diffusion transformers. All of them can be planned, encoded for and trained."""
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
        "text_pipeline": model.text_pipeline,
    }


def _native_latents(model: CatalogModel) -> tuple[int, ...] | None:
    from bigdit.catalog.models import latent_shape

    side, clip = model.resolution, model.clip
    if clip is not None:
        return latent_shape(model, clip.height, clip.width, clip.frames)
    return None if side is None else latent_shape(model, side, side)


def _table(found: list[CatalogModel]) -> Table:
    from bigdit.report.tables import DASH, cell, table

    columns = ("model", "params", "blocks", "px", "latents", "text")
    made = table("Diffusion transformers", columns, numeric=columns[1:])
    for m in found:
        text = m.text
        made.add_row(
            m.name,
            DASH if m.params is None else count(m.params),
            "+".join(str(length) for _, length in m.block_lists),
            cell(m.resolution),
            cell(_native_latents(m)),
            DASH if text is None else f"{text.tokens or '?'}×{text.dim or '?'}",
        )
    made.caption = f"{len(found)} model{'' if len(found) == 1 else 's'}"
    return made
