"""`bigdit recipe`: runs that fit their GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigdit import log
from bigdit.commands import Json
from bigdit.errors import UserError
from bigdit.files import write_text

if TYPE_CHECKING:
    from bigdit.recipes import Recipe

HELP = "Runs that fit their GPUs, to copy and fill in."

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A recipe of `bigdit recipe list`.")]


@app.command("list")
def every(as_json: Json = False) -> None:
    """List all recipes: what is trained on which GPU, and what it needs."""
    from bigdit.recipes import names, recipe
    from bigdit.report.recipes import listed

    found = [recipe(name) for name in names()]
    if as_json:
        log.emit_json([_document(each) for each in found])
    else:
        log.out.print(listed(found))


@app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show one recipe: what it needs, the commands from download to samples, and its YAML."""
    from bigdit.recipes import recipe
    from bigdit.report.recipes import shown

    found = recipe(name)
    if as_json:
        log.emit_json(_document(found) | {"commands": found.commands, "yaml": found.text})
        return
    for part in shown(found, log.out.width):
        log.out.print(part, highlight=False, markup=False, soft_wrap=True)


@app.command()
def copy(
    name: Name,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A file that ends with .yaml, or a folder. Default: NAME.yaml here."),
    ] = None,
) -> None:
    """Write a recipe's YAML, to fill in. An existing file is never replaced."""
    from bigdit.recipes import recipe

    found = recipe(name)
    file = out or Path()
    if file.is_dir() or not (file.suffix in (".yaml", ".yml") or file.exists()):
        file = file / f"{found.name}.yaml"
    if file.exists():
        raise UserError(f"{file} exists already, and was not changed; name another file with --out")
    write_text(file, found.text)
    log.notice(f"wrote {file}")


def _document(found: Recipe) -> dict[str, Any]:
    """A recipe as JSON."""
    took = found.took.model_dump(mode="json") if found.took else None
    return {"name": found.name, "title": found.title, **found.about.model_dump(), "took": took}
