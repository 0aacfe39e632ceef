"""Options that several commands share, worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", help="The run's YAML.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a config key; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
