"""The reference, made from what bigdit itself reads: the keys of a run and of a strategy, and the command line.

Meanings are those of the docstrings of classes and fields, and of `--help`; nothing is written twice.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.structure.files import File
from pydantic import BaseModel

from bigdit.app import app
from bigdit.config.run import RunConfig
from bigdit.config.wrong import meanings
from bigdit.strategy import Strategy
from bigdit.units import LARGEST

RUN = """# A run's keys

The YAML of `bigdit extract` and `bigdit train`, section by section. `--set a.b=c` overrides a key. For an unknown
key, the error names the nearest known one. A key without a default is required.
"""
STRATEGY = """# A strategy's keys

The section `strategy` of [a run](run.md), which plans write. `bigdit profile --strategy` takes the same keys.
"""
COMMANDS = """# Commands

What `bigdit COMMAND --help` prints. The exit status is 0 when done, 1 for an error in the input, 2 if something does
not fit, 3 for a bug, 130 when interrupted, 128 + n when ended by signal n.
"""


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' event: add the pages."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


def pages() -> dict[str, str]:
    """The pages of the reference, in Markdown."""
    return {
        "run.md": RUN + _sections(RunConfig),
        "strategy.md": STRATEGY + _table(Strategy),
        "commands.md": COMMANDS + "\n".join(_command(*found) for found in commands()),
    }


def sections(model: type[BaseModel], path: str = "") -> dict[str, tuple[str, type[BaseModel]]]:
    """The models that a model's keys stand for, by name, each with where it stands in the YAML; itself first."""
    found = {model.__name__: (path, model)}
    for key, field in model.model_fields.items():
        for part in _models(field.annotation):
            found |= sections(part, f"{path}.{key}".removeprefix("."))
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models(argument)


def _sections(model: type[BaseModel]) -> str:
    return "\n".join(
        f"\n## {f'{path}: ' if path else ''}{name} {{#{name.lower()}}}\n{_table(part)}"
        for name, (path, part) in sections(model).items()
    )


def _table(model: type[BaseModel]) -> str:
    """What a model's docstring says, and its keys."""
    schema = model.model_json_schema(ref_template="{model}")
    meant = {key: _cell(" ".join(meaning.split())) for key, meaning in meanings(model).items()}
    required = schema.get("required", [])
    rows = [
        f"| `{key}` | {meant[key]} | {kind(part)} | {'' if key in required else _default(part)} |"
        for key, part in schema["properties"].items()
    ]
    rows += [f"| `{key}` | {_cell(meaning)} | | |" for key, meaning in getattr(model, "also", {}).items()]
    head = ["| key | meaning | type | default |", "| --- | --- | --- | --- |"]
    return "\n".join(["", inspect.getdoc(model) or "", "", *head, *rows, ""])


def kind(part: dict[str, Any]) -> str:
    """A JSON schema of one value, in words."""
    if "$ref" in part:
        return f"[{part['$ref']}](run.md#{part['$ref'].lower()})"
    for several in ("anyOf", "oneOf"):
        if several in part:
            return " or ".join(dict.fromkeys(map(kind, part[several])))
    if "enum" in part or "const" in part:
        return ", ".join(f"`{choice}`" for choice in part.get("enum", [part.get("const")]))
    if "prefixItems" in part:
        return f"[{', '.join(map(kind, part['prefixItems']))}]"
    if part["type"] == "array":
        return f"list of {kind(part['items'])}"
    words = {"string": "path" if part.get("format") == "path" else "text", "boolean": "true or false"}
    words |= {"integer": "integer", "object": "mapping", "null": "null"}
    return words.get(part["type"], part["type"]) + _bounds(part)


def _bounds(part: dict[str, Any]) -> str:
    """Limits as pydantic writes them: JSON schema's names of integers, its own of checked floats."""
    names = {"exclusiveMinimum": ">", "gt": ">", "minimum": "≥", "ge": "≥", "exclusiveMaximum": "<", "lt": "<"}
    names |= {"maximum": "≤", "le": "≤"}
    found = [f"{sign} {part[name]:g}" for name, sign in names.items() if part.get(name, LARGEST) != LARGEST]
    return f" {', '.join(found)}" if found else ""


def _default(part: dict[str, Any]) -> str:
    default = part.get("default")
    return "see there" if isinstance(default, dict) and default else f"`{json.dumps(default)}`"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of the command line by its full name, those of groups after one another."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        else:
            yield name, command


def _command(name: str, command: Any) -> str:
    context = command.make_context(f"bigdit {name}", [], resilient_parsing=True)
    rows = [
        f"| `{what}` | {_cell(meaning)} |"
        for what, meaning in (parameter.get_help_record(context) for parameter in command.params)
    ]
    table = ["| option | meaning |", "| --- | --- |", *rows] if rows else []
    return "\n".join([f"\n## bigdit {name}\n", inspect.cleandoc(command.help or ""), "", *table, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
