"""The commands and their options: one module of bigdit/commands a command; parsing here, the work there."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from bigdit import __version__
from bigdit.commands import (
    bench,
    doctor,
    emulate,
    export,
    extract,
    features,
    gpus,
    models,
    plan,
    profile,
    receipts,
    recipe,
    report,
    sample,
    setup,
    train,
)
from bigdit.errors import EXIT_USER, UserError

# typer carries its own click, whose UsageError it does not export.
UsageError: Any = typer.BadParameter.__base__

WIDEST = 1000
"""Columns of help at most: the terminal's, where they are fewer. click's own limit is 80."""

HELP = {"-h", "--help", "--version"}
"""What is answered anywhere; behind -- they are another command's."""

app = typer.Typer(
    name="bigdit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
for name, module in {
    "plan": plan,
    "profile": profile,
    "emulate": emulate,
    "extract": extract,
    "train": train,
    "report": report,
    "sample": sample,
    "export": export,
    "models": models,
    "gpus": gpus,
    "setup": setup,
    "doctor": doctor,
}.items():
    app.command(name)(module.run)
groups = {"bench": bench, "features": features, "receipts": receipts, "recipe": recipe}
for name, module in groups.items():
    app.add_typer(module.app, name=name, short_help=module.HELP)
for command in (
    *app.registered_commands,
    *(each for group in groups.values() for each in group.app.registered_commands),
):  # or click cuts them off at a line
    command.short_help = (inspect.getdoc(command.callback) or "").partition("\n\n")[0]


def _show_version(asked: bool) -> None:
    if asked:
        print(f"bigdit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Plan and train large diffusion transformers: what fits, how fast, with which settings."""


@functools.cache
def _command() -> Any:
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run a command; its exit status. Ctrl-C is left to the caller: typer would end it without a word."""
    if arguments and not HELP & set(itertools.takewhile(lambda each: each != "--", arguments)):
        _check_folder()
    command = _command()
    try:
        with command.make_context("bigdit", list(arguments)) as context:
            result = command.invoke(context)
    except UsageError as error:  # an unknown option or a missing one: click would exit 2, which means DOES NOT FIT
        _say_by_its_option(error)
        _say_by_meaning(error)
        error.show()
        return EXIT_USER
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, EOFError):
        raise KeyboardInterrupt from None
    return result if isinstance(result, int) else 0


def _check_folder() -> None:
    """Raise UserError where the working folder is gone, in which torch's own libraries do not load."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder is gone; go to one that is there (cd)") from None


def _say_by_its_option(error: Any) -> None:
    """Raise UserError for a value that an option does not take, which typer says in pydantic's words."""
    from pydantic import ValidationError

    from bigdit.config.wrong import expected

    if isinstance(error.__cause__, ValidationError):
        raise UserError(f"{error.param.opts[0]} {expected(error.__cause__.errors(include_url=False))}") from None


def _say_by_meaning(error: Any) -> None:
    """Name what the command has for an option of other trainers, in the place of options that are spelt like it."""
    from bigdit.config.wrong import key_meant, suggested

    option = getattr(error, "option_name", None)
    meant = key_meant(option) if option else None
    if meant is None:
        return
    here = {each: param for param in error.ctx.command.params for each in param.opts}
    own = next((each for each in meant.options if each in here), None)
    if own is not None:
        hint = f"did you mean {own}? {here[own].help}"
    else:
        hint = suggested(meant, f"--set {meant.key}=…" if "--set" in here else f"{meant.key} in a run's YAML")
    error.message, error.possibilities = f"{error.message}; {hint}", None
