"""`bigdit bench`: what a step takes; a file each."""

from __future__ import annotations

import typer

from bigdit.commands.bench import memory, step

HELP = (
    "What a step takes: memory against micro-batch on any GPU; and on this machine the run's own step, by turns with "
    "that of a plain loop."
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)
app.command("memory")(memory.run)
app.command("step")(step.run)
