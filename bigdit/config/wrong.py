"""What is wrong with a document's values: a line for each key, in the words of who wrote it and not of pydantic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bigdit.config.other_trainers import key_meant, suggested, value_meant
from bigdit.errors import nearest
from bigdit.objective_spec import NUMBER
from bigdit.spec import Contradictory

Key = tuple[str | int, ...]

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "path_type": "a path",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
}
_BOUNDS = {
    "greater_than": ("a number above {:g}", "gt"),
    "greater_than_equal": ("{} or more", "ge"),
    "less_than": ("a number below {:g}", "lt"),
    "less_than_equal": ("{} or less", "le"),
    "too_short": ("a list of at least {}", "min_length"),
    "too_long": ("a list of {}", "max_length"),
}
_MOST_SHOWN = 60


def wrong(error: ValidationError, document: Any, kind: type[BaseModel]) -> list[str]:
    """A line for each key of `document`, which is no `kind`, that is not taken, not known or missing."""
    found: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_key(detail, document), []).append(detail)
    inmost = [key for key in found if not any(other[: len(key)] == key and other != key for other in found)]
    return [line for key in inmost for line in _lines(".".join(map(str, key)), found[key], kind)]


def expected(details: Sequence[ErrorDetails]) -> str:
    """`is 'x', and a whole number or all was expected`: what was found, and what would be taken."""
    names = [name for detail in details for name in _names(detail)]
    value = details[0]["input"]
    if details[0]["type"] == "union_tag_invalid":
        value = value["name"]
    if len(names) > 1:
        meant = value_meant(str(value), names)
        near = nearest(str(value), names) if meant is None else suggested(meant)
        return f"is {shown(value)}, which is not known; {near}"
    kinds = [_expected(detail) for detail in details if not _names(detail)]
    return f"is {shown(value)}, and {' or '.join(dict.fromkeys([*kinds, *names]))} was expected"


def shown(value: Any) -> str:
    """A value as YAML has it, cut where it is long."""
    words = {"True": "true", "False": "false", "None": "null"}
    text = repr(value)
    return words.get(text, text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")


def _key(detail: ErrorDetails, document: Any) -> Key:
    """Where in the document it is: pydantic's path without the names of what a value could have been."""
    key: list[str | int] = []
    for part in detail["loc"]:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            continue
        key.append(part)
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        key.append(detail["loc"][-1])
    if detail["type"] == "union_tag_invalid":
        key.append("name")
    return tuple(key)


def _lines(key: str, details: Sequence[ErrorDetails], kind: type[BaseModel]) -> list[str]:
    cause = details[0].get("ctx", {}).get("error")
    if isinstance(cause, Contradictory):
        return [f"{key}: {problem}" if key else problem for problem in cause.problems]
    return [_line(key, details, kind)]


def _line(key: str, details: Sequence[ErrorDetails], kind: type[BaseModel]) -> str:
    first = details[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_hint(path, kind)}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return f"{key}: missing" + (f" ({meaning})" if (meaning := _meaning(path, kind)) else "; it has no default")
    if path[-1:] == ["[key]"]:
        return f"{key}: this key is no text; put quotes around it"
    if first["type"] == "value_error":
        message, found = first["msg"].removeprefix("Value error, "), first["input"]
        told = message if isinstance(found, dict | list) else f"{message}; {shown(found)} was found"
        return f"{key}: {told}" if key else message
    if first["type"] in ("model_type", "model_attributes_type"):
        known = _fields_at(path, kind)
        return f"{key} is {shown(first['input'])}, and keys such as {', '.join(known[:6])} were expected"
    return f"{key} {expected(details)}".lstrip()


def _names(detail: ErrorDetails) -> list[str]:
    """Those that a value may be, where it may be one of several names."""
    _, among, names = detail["msg"].partition(" is not one of ")
    if among and detail["type"] == "value_error":  # as typer says it
        return re.findall(r"'([^']+)'", names)
    if detail["type"] not in ("literal_error", "union_tag_invalid"):
        return []
    context = detail.get("ctx", {})
    found = re.findall(r"'([^']+)'", str(context.get("expected") or context.get("expected_tags")))
    return [name for name in found if name != NUMBER]  # which is no name, but a value in the place of one


def _expected(detail: ErrorDetails) -> str:
    """What would have been taken, of one of the kinds that a value may be."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":  # the end of a list
        return f"a list of {int(detail['loc'][-1]) + 1}"
    if kind == "union_tag_not_found":
        return "a mapping with a name"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return words.format(context[bound])
    return _EXPECTED.get(kind, detail["msg"])


def _hint(path: Sequence[str], kind: type[BaseModel]) -> str:
    """Where a misplaced key belongs, what other trainers mean by it, or what a misspelt one may have meant."""
    here = _fields_at(path[:-1], kind)
    section, key = path[:-1], path[-1]
    if section and (
        others := [name for name in _others(section, kind) if key in _fields_at([*section[:-1], name], kind)]
    ):
        return f"{section[-1]} has none; it is of {' and '.join(others)}"
    meant = key_meant(".".join(path), path[-1])
    if meant is not None:
        parts = meant.key.split(".")
        if all(part in _fields_at(parts[:at], kind) for at, part in enumerate(parts)):
            return suggested(meant)
        if parts[-1] in here:
            return suggested(meant, parts[-1])
    elsewhere = [f"{section}.{path[-1]}" for section in kind.model_fields if path[-1] in _fields_at([section], kind)]
    return _with_meaning(
        f"did you mean {', '.join(elsewhere)}?" if elsewhere else nearest(path[-1], here), section, kind
    )


def _with_meaning(hint: str, section: Sequence[str], kind: type[BaseModel]) -> str:
    """The hint, and of the only key that it names what that means."""
    name = re.fullmatch(r"did you mean ([\w.]+)\?", hint)
    path = [] if name is None else name[1].split(".") if "." in name[1] else [*section, name[1]]
    meaning = _meaning(path, kind) if path else ""
    return f"{hint} ({meaning})" if meaning else hint


def _others(section: Sequence[str], kind: type[BaseModel]) -> list[str]:
    """What the section at this path could have been of its union; none where it is of no union."""
    names = [_name_of(model) for model in _models_at(section[:-1], kind)]
    return [name for name in names if name is not None and name != section[-1]] if section[-1] in names else []


def _fields_at(path: Sequence[str], kind: type[BaseModel]) -> list[str]:
    """The keys that the section at `path` knows."""
    models = _models_at(path, kind)
    return list(dict.fromkeys(name for model in models for name in (*model.model_fields, *getattr(model, "also", ()))))


def _meaning(path: Sequence[str], kind: type[BaseModel]) -> str:
    """The first clause of what the key at `path` means; nothing where its model says none."""
    fields = [model.model_fields.get(path[-1]) for model in _models_at(path[:-1], kind)]
    said = next((each.description for each in fields if each is not None and each.description), "")
    first = re.split(r"[.;] ", " ".join(said.split()))[0].rstrip(".")
    return first[:1].lower() + first[1:]


def _models_at(path: Sequence[str], kind: type[BaseModel]) -> list[type[BaseModel]]:
    models = [kind]
    for part in path:
        inner = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        if inner:
            models = [m for annotation in inner for m in _models_in(annotation)]
        else:  # the tag of a discriminated union stands in the path as well: data's key `image` → `identity`
            models = [m for m in models if _name_of(m) == part] or models
    return models


def _name_of(model: type[BaseModel]) -> str | None:
    """By which a union of models knows it."""
    found: str | None = getattr(model.model_fields.get("name"), "default", None)
    return found if isinstance(found, str) else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
