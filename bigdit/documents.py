"""Reads users' YAML and JSON: plain values within limits, or an error of one line.

A small document can expand to gigabytes (aliases), overflow the interpreter's stack (nesting), or have integers that
are too large. Types of keys' numbers: no booleans, finite, integers of at most 64 bits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from bigdit.errors import UserError
from bigdit.files import MOST_BYTES, read_bytes
from bigdit.units import LARGEST, LARGEST_SIDE

DEEPEST = 64
"""The most levels of lists and mappings; documents of DeepSpeed and diffusers have four."""

MOST_VALUES = 25_000
"""The most values of a YAML document, with aliases expanded. A plan has about a thousand; ImageNet-21k has 21,841
classes."""

MOST_YAML_BYTES = 2**20
"""PyYAML reads about a megabyte a second."""

_MOST_DIGITS = 70  # 64 bits, in binary as well
_DEEP = f"nested too deeply: {DEEPEST} levels are the most"


class _Refused(ValueError):
    """The problem of a document beyond the limits."""


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises OSError if it cannot be read; ValueError as `parse_json`."""
    return parse_json(read_bytes(path))


def indexed_files(index: Path) -> list[Path]:
    """The weight files that an index of safetensors names. Raises OSError if it cannot be read; ValueError if it names
    anything but .safetensors files in its folder."""
    document = read_json(index)
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict):
        raise ValueError(f"{index.name} has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise ValueError(f"{index.name} names {str(name)[:60]!r}; only .safetensors files in its folder are read")
    return [index.parent / name for name in sorted(set(names.values()))]


_VARIANTS = (None, "bf16", "fp16", "fp32")


def weight_files(folder: Path, *names: str) -> tuple[list[Path], str | None]:
    """The weight files in a folder, by the first of `names` that exists, and their variant: None, or `bf16` of
    model.bf16.safetensors. A file is its own weight file. Raises OSError or ValueError for an unreadable index."""
    if folder.is_file():
        return [folder], None
    for name in names:
        for variant in _VARIANTS:
            of = f".{variant}" if variant else ""
            index, file = folder / f"{name}.index{of}.json", folder / f"{Path(name).stem}{of}.safetensors"
            if index.exists():
                return indexed_files(index), variant
            if file.exists():
                return [file], variant
    return [], None


def read_file(path: Path, name: str, where_missing: str = "") -> bytes:
    """The bytes of a file, called `name` in errors. Raises UserError; `where_missing`: a hint if it does not exist."""
    try:
        return read_bytes(path)
    except FileNotFoundError:
        raise UserError(f"{name} does not exist{where_missing}") from None
    except IsADirectoryError:
        raise UserError(f"{name} is a folder; name a file in it") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from None


def read_mapping(path: Path, parse: Callable[[bytes], Any], name: str, expected: str) -> dict[str, Any]:
    """The mapping in a file that `parse` reads. Raises UserError if it is missing, damaged, or no mapping."""
    try:
        document = parse(read_file(path, name))
    except ValueError as error:
        raise UserError(f"{name} is {error}") from None
    if not isinstance(document, dict):
        found = {type(None): "is empty", list: "is a list"}.get(type(document), "is a single value")
        raise UserError(f"{name} {found}, and {expected} was expected")
    return document


def parse_yaml(text: str | bytes) -> Any:
    """The value of a YAML document.

    Raises ValueError, whose text follows `it is`: not YAML; nesting, aliases or integers beyond the limits; repeated
    keys; text that no file name can have.
    """
    try:
        _short(text, MOST_YAML_BYTES)
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _measure(root, {})
        return loader.construct_document(root)
    except _Refused:
        raise
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise ValueError(f"not YAML: {error.problem}{where}") from None
    except Exception as error:  # constructors of tags such as !!timestamp raise many classes
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document. Raises ValueError as `parse_yaml`."""
    try:
        _short(text, MOST_BYTES)
        value = json.loads(text, parse_int=lambda digits: _bounded(digits, int), object_pairs_hook=_distinct)
        _check(value)
    except _Refused:
        raise
    except RecursionError:
        raise ValueError(_DEEP) from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    return value


def parse_value(text: str, named: str) -> Any:
    """A value in YAML that was given as an option, called `named` in the UserError for what is no YAML."""
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{named}: the value is {error}") from None


def at(document: Any, keys: Sequence[str]) -> Any:
    """The value at `keys` of nested mappings; None if there is none."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def differences(found: Any, wanted: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, found, wanted) of all values that differ between two documents; None for a missing key."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() | wanted.keys()):
            yield from differences(found.get(name), wanted.get(name), f"{key}.{name}".removeprefix("."))
    elif found != wanted:
        yield key, found, wanted


def written(value: Any) -> str:
    """A value on one line, as in YAML, without null values of a mapping."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    return value if isinstance(value, str) else json.dumps(value)


class _Loader(yaml.SafeLoader):
    """Rejects values beyond the limits, with their line, as early as possible."""

    _depth = _values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        self._values += 1
        if self._values > MOST_VALUES:
            raise _Refused(f"too large: {MOST_VALUES} values are the most (line {self.line + 1})")
        if self._depth > DEEPEST:
            raise _Refused(f"{_DEEP} (line {self.line + 1})")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _Refused(f"ambiguous: the key {key.value[:40]} is repeated{_where(key)}")
                seen.add((key.tag, key.value))
        return node

    def construct_yaml_int(self, node: Any) -> int:
        return _bounded(node.value, lambda _: super(_Loader, self).construct_yaml_int(node), _where(node))

    def construct_yaml_str(self, node: Any) -> str:
        return _nameable(super().construct_yaml_str(node), _where(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_yaml_str)


def _short(text: str | bytes, most: int) -> None:
    if len(text) > most:
        raise _Refused(f"too large: {most} bytes are the most, and it has {len(text)}")


def _where(node: yaml.Node) -> str:
    return f" (line {node.start_mark.line + 1})"


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """The numbers of values and levels of a node, with aliases followed. `known`: results by id; None while a node is
    measured.

    The recursion is not deeper than the document: an alias comes after its target, which is known.
    """
    if id(node) in known:
        if (found := known[id(node)]) is None:
            raise _Refused(f"endless: an alias contains itself{_where(node)}")
        return found
    known[id(node)] = None
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    pairs = [each for pair in inner for each in pair] if isinstance(node, yaml.MappingNode) else inner
    parts = [_measure(each, known) for each in pairs]
    values, levels = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
    if values > MOST_VALUES:
        raise _Refused(f"too large: {MOST_VALUES} values are the most, aliases followed{_where(node)}")
    if levels > DEEPEST:
        raise _Refused(f"{_DEEP}, aliases followed{_where(node)}")
    known[id(node)] = values, levels
    return values, levels


def _check(value: Any) -> None:
    """Check the depth and the texts of a JSON value."""
    waiting = [(value, 1)]
    while waiting:
        value, level = waiting.pop()
        if level > DEEPEST:
            raise _Refused(_DEEP)
        if isinstance(value, str):
            _nameable(value)
        elif isinstance(value, dict):
            waiting += [(each, level + 1) for pair in value.items() for each in pair]
        elif isinstance(value, list):
            waiting += [(each, level + 1) for each in value]


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise _Refused(f"ambiguous: the key {twice[:40]} is repeated")
    return found


def _bounded(digits: str, convert: Callable[[str], int], where: str = "") -> int:
    """The integer of these `digits`. Raises _Refused beyond 64 bits."""
    if len(digits) <= _MOST_DIGITS:
        number = convert(digits)
        if number.bit_length() <= 64:
            return number
    raise _Refused(f"beyond 64 bits in an integer of {len(digits)} digits{where}")


def _nameable(text: str, where: str = "") -> str:
    """The text. Raises _Refused for a zero byte or half a surrogate pair."""
    if "\0" not in text:
        try:
            text.encode()
            return text
        except UnicodeEncodeError:
            pass
    raise _Refused(f"not valid: the text {text[:40]!r}{where} holds what no file name can")


MOST_PROCESSES = 1024
"""The most processes or threads on one machine, which has a few hundred cores and at most 16 GPUs."""


def no_truth_value(value: Any) -> Any:
    """The value, unless it is a boolean, which Python treats as 1 or 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "a number was expected")
    return value


_Whole = Annotated[int, Field(strict=True, le=LARGEST)]
Natural = Annotated[_Whole, Field(ge=0)]
Count = Annotated[_Whole, Field(ge=1)]
Processes = Annotated[_Whole, Field(ge=1, le=MOST_PROCESSES)]
Side = Annotated[_Whole, Field(ge=1, le=LARGEST_SIDE)]

Number = Annotated[float, BeforeValidator(no_truth_value), Field(allow_inf_nan=False)]
"""Accepts text such as `1e-4`, which is no number in YAML 1.1."""
Degree = Annotated[Literal[1, 2, 4, 8], BeforeValidator(no_truth_value)]
Positive = Annotated[Number, Field(gt=0.0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]

Switch = Annotated[bool, Field(strict=True)]
