"""`bigdit bench`: what a step takes, and parts of a training against what one would write by hand; a file each."""

from __future__ import annotations

import typer

from bigdit.commands.bench import extract, loader, memory, optimizer, step

HELP = (
    "What a step takes: memory against micro-batch on any GPU; and on this machine the run's own step, loader, "
    "extraction and optimizers, each by turns with a plain one."
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)
for name, module in {
    "memory": memory,
    "step": step,
    "loader": loader,
    "extract": extract,
    "optimizer": optimizer,
}.items():
    app.command(name)(module.run)
