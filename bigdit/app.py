"""The command line: its commands, each a module of bigdit/commands, and errors of its options."""

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
    init,
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

# typer has its own click, and does not export its UsageError.
UsageError: Any = typer.BadParameter.__base__

WIDEST = 1000
"""The most columns of help; click's own limit is 80."""

HELP = {"-h", "--help", "--version"}
"""Options that work anywhere before `--`."""

app = typer.Typer(
    name="bigdit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
for module in (init, plan, profile, emulate, extract, train, report, sample, export, models, gpus, setup, doctor):
    app.command(module.__name__.rpartition(".")[2])(module.run)
commands = [*app.registered_commands]
for module in (bench, features, receipts, recipe):
    app.add_typer(module.app, name=module.__name__.rpartition(".")[2], short_help=module.HELP)
    commands += module.app.registered_commands
for command in commands:  # else click truncates the texts
    command.short_help = (inspect.getdoc(command.callback) or "").partition("\n\n")[0]


def _show_version(given: bool) -> None:
    if given:
        print(f"bigdit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Plan and train large diffusion transformers: what fits, how fast, with which settings."""


@functools.cache
def _command() -> Any:
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status. Ctrl-C raises KeyboardInterrupt."""
    if arguments and not HELP & set(itertools.takewhile(lambda each: each != "--", arguments)):
        _check_folder()
    command = _command()
    try:
        with command.make_context("bigdit", _with_value(arguments)) as context:
            result = command.invoke(context)
    except UsageError as error:  # such as an unknown option: click would exit 2, which means DOES NOT FIT
        _raise_by_option(error)
        _add_hint(error)
        message = error.format_message()
        if message == "Missing option '--config'." and (
            files := [each for each in arguments if each.endswith((".yaml", ".yml"))]
        ):
            message = f"{message.rstrip('.')}; did you mean --config {files[0]}?"
        if message.startswith("Usage: "):  # a group without a command shows its help
            error.show()
            return EXIT_USER
        helped = f"`{_called(arguments)} --help` lists all"
        raise UserError(f"{message[0].lower()}{message[1:].rstrip('.')} ({helped})") from None
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, EOFError):
        raise KeyboardInterrupt from None
    return result if isinstance(result, int) else 0


def _called(arguments: Sequence[str]) -> str:
    """The command as it was called, such as `bigdit bench step`."""
    command, path = _command(), "bigdit"
    for each in arguments:
        if each not in getattr(command, "commands", {}):
            break
        command, path = command.commands[each], f"{path} {each}"
    return path


def _with_value(arguments: Sequence[str]) -> list[str]:
    """Replace `plan --fp8` by `plan --fp8 tensorwise`: typer has no optional values."""
    found = list(arguments)
    if found[:1] == ["plan"] and "--fp8" in found:
        after = found.index("--fp8") + 1
        if found[after : after + 1] == [] or found[after].startswith("-"):
            found.insert(after, "tensorwise")
    return found


def _check_folder() -> None:
    """Raise UserError if the working folder was removed: torch's libraries would not load."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder was removed; change to another (cd)") from None


def _raise_by_option(error: Any) -> None:
    """Raise UserError for a value of an option that pydantic rejects."""
    from pydantic import ValidationError

    from bigdit.config.wrong import expected

    if isinstance(error.__cause__, ValidationError):
        raise UserError(f"{error.param.opts[0]} {expected(error.__cause__.errors(include_url=False))}") from None


def _add_hint(error: Any) -> None:
    """For an option of other trainers, name this command's option instead of similar spellings."""
    from bigdit.config.wrong import key_meant, suggested

    option = getattr(error, "option_name", None)
    meant = key_meant(option) if option else None
    if meant is None or error.ctx is None:  # ctx is None if a known option lacks its value
        return
    here = {each: param for param in error.ctx.command.params for each in param.opts}
    own = next((each for each in meant.options if each in here), None)
    if own is not None:
        hint = f"did you mean {own}? ({here[own].help.rstrip('.')})"
    else:
        hint = suggested(meant, f"--set {meant.key}=…" if "--set" in here else f"{meant.key} in a run's YAML")
    error.message, error.possibilities = f"{error.message}; {hint}", None
