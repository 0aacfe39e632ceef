"""Messages for invalid values in a document: one line for each key, without pydantic's terms.

`other_trainers.json` has the names of keys, options and values in other trainers, from the documentation of diffusers'
scripts, kohya's sd-scripts, SimpleTuner, ai-toolkit, OneTrainer, accelerate and transformers' Trainer. It has false for
fp32, since YAML reads `no` as false.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bigdit.errors import nearest
from bigdit.objective_spec import NUMBER
from bigdit.strategy import Contradictory


class Meant(NamedTuple):
    """The `key` of a run, a note on its value, and the `options` of commands for it."""

    key: str
    note: str = ""
    options: tuple[str, ...] = ()


_OTHERS: dict[str, Any] = json.loads(Path(__file__).with_name("other_trainers.json").read_text(encoding="utf-8"))


def _meant(part: str) -> dict[Meant, list[str]]:
    """The names in other trainers by what they mean here."""
    return {
        Meant(each["key"], each.get("note", ""), tuple(each.get("options", ()))): each["names"].split()
        for each in _OTHERS[part]
    }


_NAMES, _VALUES = _meant("keys"), _meant("values")

NONE = {name: what for what, names in _OTHERS["none"].items() for name in names.split()}
"""Keys of other trainers for which a run has none, by what it does."""

KEYS = {name: meant for meant, names in _NAMES.items() for name in names}
"""Keys by their names in other trainers; with the section where the name alone is ambiguous."""


def key_meant(*names: str) -> Meant | None:
    """The meaning of the first of these names that is known from other trainers, in any spelling."""
    return next((KEYS[name] for name in map(_plain, names) if name in KEYS), None)


def meant_within(document: Any, key: str = "") -> Iterator[str]:
    """A line for each key of another trainer's document, at any depth, whose meaning is known."""
    if isinstance(document, list):
        document = dict(enumerate(document))
    for name, value in document.items() if isinstance(document, dict) else ():
        path = f"{key}.{name}".removeprefix(".")
        meant = key_meant(str(name))
        if (what := NONE.get(_plain(str(name)))) is not None:
            yield f"{path}: unknown key; a run has none: {what}"
        elif meant is not None and not isinstance(value, dict):
            yield f"{path}: unknown key; {suggested(meant)}"
        yield from meant_within(value, path)


def _plain(name: str) -> str:
    return name.lstrip("-").casefold().replace("-", "_")


def value_meant(value: str, known: Collection[str]) -> Meant | None:
    """Which of the `known` values is meant: the same in another spelling, or by its name in other trainers."""
    found = [Meant(each) for each in known if _letters(each) == _letters(value)]
    found += [
        meant for meant, names in _VALUES.items() if meant.key in known and _letters(value) in map(_letters, names)
    ]
    return found[0] if found else None


def suggested(meant: Meant, key: str | None = None) -> str:
    """`did you mean train.lr_schedule? (constant, cosine or wsd)`; `key` replaces the key."""
    return f"did you mean {key or meant.key}?" + (f" ({meant.note})" if meant.note else "")


def _letters(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


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
    "string_too_short": ("a text of {} or more characters", "min_length"),
}
_MOST_SHOWN = 60


def wrong(error: ValidationError, document: Any, kind: type[BaseModel]) -> list[str]:
    """A line for each key of `document` that is wrong or unknown in a `kind`, then for each that is missing."""
    found: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_key(detail, document), []).append(detail)
    inmost = [key for key in found if not any(other[: len(key)] == key and other != key for other in found)]
    inmost.sort(key=lambda key: found[key][0]["type"] == "missing")
    return [line for key in inmost for line in _lines(".".join(map(str, key)), found[key], kind)]


def expected(details: Sequence[ErrorDetails]) -> str:
    """`is 'x', and a whole number or all was expected`: what was found, and what is possible."""
    names = [name for detail in details for name in _names(detail)]
    value = details[0]["input"]
    if details[0]["type"] == "union_tag_invalid":
        value = value["name"]
    if len(names) > 1:
        meant = value_meant(str(value), names)
        near = nearest(str(value), names) if meant is None else suggested(meant)
        return f"is {shown(value)}, which is unknown; {near}"
    short = details[0]["type"] == "missing"  # the last missing value tells the length of the list
    kinds = [_expected(detail) for detail in details[-1 if short else 0 :] if not _names(detail)]
    return f"is {shown(value)}, and {' or '.join(dict.fromkeys([*kinds, *names]))} was expected"


def shown(value: Any) -> str:
    """A value in YAML, shortened where it is long."""
    words = {"True": "true", "False": "false", "None": "null"}
    text = repr(value)
    return words.get(text, text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")


def _key(detail: ErrorDetails, document: Any) -> Key:
    """The key in the document: pydantic's path without the names of a union's types."""
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
        return f"{key}: a key must be text; put quotes around it"
    if first["type"] == "value_error":
        message, found = first["msg"].removeprefix("Value error, "), first["input"]
        full = message if isinstance(found, dict | list) else f"{message}; {shown(found)} was found"
        return f"{key}: {full}" if key else message
    if first["type"] in ("model_type", "model_attributes_type"):
        known = _fields_at(path, kind)
        return f"{key} is {shown(first['input'])}, and keys such as {', '.join(known[:6])} were expected"
    return f"{key} {expected(details)}".lstrip()


def _names(detail: ErrorDetails) -> list[str]:
    """The possible names, for a value that is one of several."""
    _, among, names = detail["msg"].partition(" is not one of ")
    if among and detail["type"] == "value_error":  # typer's message
        return re.findall(r"'([^']+)'", names)
    if detail["type"] not in ("literal_error", "union_tag_invalid"):
        return []
    context = detail.get("ctx", {})
    found = re.findall(r"'([^']+)'", str(context.get("expected") or context.get("expected_tags")))
    return [name for name in found if name != NUMBER]  # stands for a value without a name


def _expected(detail: ErrorDetails) -> str:
    """The expected value, for one of the possible types."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":  # the end of a list
        return f"a list of {int(detail['loc'][-1]) + 1}"
    if kind == "union_tag_not_found":
        return "a mapping with a name"
    if kind == "literal_error":  # of numbers
        return str(context["expected"])
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return words.format(context[bound])
    return _EXPECTED.get(kind, detail["msg"])


def _hint(path: Sequence[str], kind: type[BaseModel]) -> str:
    """Where a misplaced key belongs, its meaning in other trainers, or the nearest key to a misspelt one."""
    here = _fields_at(path[:-1], kind)
    section, key = path[:-1], path[-1]
    if section and (
        others := [name for name in _others(section, kind) if key in _fields_at([*section[:-1], name], kind)]
    ):
        return f"{section[-1]} has no such key; {' and '.join(others)} has it"
    if (what := NONE.get(_plain(key))) is not None:
        return f"a run has none: {what}"
    meant = key_meant(".".join(path), key)
    if meant is not None:
        parts = meant.key.split(".")
        if [part for part in section if not part.isdecimal()][: len(parts)] == parts and "path" in here:
            return suggested(meant, "path")
        if all(part in _fields_at(parts[:at], kind) for at, part in enumerate(parts)):
            return suggested(meant)
        if parts[-1] in here:
            return suggested(meant, parts[-1])
    elsewhere = [f"{section}.{path[-1]}" for section in kind.model_fields if path[-1] in _fields_at([section], kind)]
    return _with_meaning(
        f"did you mean {elsewhere[0]}?" if len(elsewhere) == 1 else nearest(path[-1], here), section, kind
    )


def _with_meaning(hint: str, section: Sequence[str], kind: type[BaseModel]) -> str:
    """The hint, with the meaning of the key if it names only one."""
    name = re.fullmatch(r"did you mean ([\w.]+)\?", hint)
    path = [] if name is None else name[1].split(".") if "." in name[1] else [*section, name[1]]
    meaning = _meaning(path, kind) if path else ""
    return f"{hint} ({meaning})" if meaning else hint


def _others(section: Sequence[str], kind: type[BaseModel]) -> list[str]:
    """The other types of the section at this path, if it is one of a union."""
    names = [_name_of(model) for model in _models_at(section[:-1], kind)]
    return [name for name in names if name is not None and name != section[-1]] if section[-1] in names else []


def _fields_at(path: Sequence[str], kind: type[BaseModel]) -> list[str]:
    """The keys of the section at `path`."""
    models = _models_at(path, kind)
    return list(dict.fromkeys(name for model in models for name in (*model.model_fields, *getattr(model, "also", ()))))


def _meaning(path: Sequence[str], kind: type[BaseModel]) -> str:
    """The first clause of the meaning of the key at `path`; empty without one."""
    found = [meanings(model).get(path[-1]) for model in _models_at(path[:-1], kind)]
    text = next(filter(None, found), "")
    first = re.split(r"[.;] ", " ".join(text.split()))[0].rstrip(".")
    return first[:1].lower() + first[1:]


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field of a model, by key."""
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(parsed, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(under.value.value)
        for field, under in itertools.pairwise(parsed.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant) and isinstance(under.value.value, str)
    }


def _models_at(path: Sequence[str], kind: type[BaseModel]) -> list[type[BaseModel]]:
    models = [kind]
    for part in path:
        inner = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        if inner:
            models = [m for annotation in inner for m in _models_in(annotation)]
        else:  # the path also has the tag of a discriminated union: `image` → `identity`
            models = [m for m in models if _name_of(m) == part] or models
    return models


def _name_of(model: type[BaseModel]) -> str | None:
    """The tag of a model in a union."""
    found: str | None = getattr(model.model_fields.get("name"), "default", None)
    return found if isinstance(found, str) else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
