"""The parts of a pipeline, such as its text encoder: whether a folder holds a whole one, and copies of it."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bigdit.files import check_regular, leads_out, lfs_pointer, read_bytes

_CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_LARGEST_JSON = 2**28
"""Bytes; Gemma's tokenizer.json has 34 MB."""
_CLONE = 0x40049409
"""FICLONE. Source: ioctl_ficlone(2)."""


def part_problem(part: Path) -> str | None:
    """Why a folder holds no whole part, for people, as far as is known without reading its weights: a file that is
    missing, cut off or no JSON, or that a link has in its place from outside of the folder."""
    if not part.is_dir():
        return f"{part} is missing"
    files = sorted(part.rglob("*"))
    problems = (problem for file in files for problem in _problems(part, file))
    try:
        problem = next(problems, None)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    if problem is None and _is_model(part) and not any(file.suffix in _WEIGHTS for file in files):
        return f"{part} has no weights"
    return problem


def copy_part(source: Path, folder: Path) -> None:
    """The files of a part in a new folder, which its user may change: the source's stay as they are. They take no room
    where the file system shares what two files have in common (XFS, btrfs). Raises OSError."""
    folder.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_dir():
            copy_part(file, folder / file.name)
        elif not _cloned(file, folder / file.name):
            shutil.copyfile(file, folder / file.name)


def _problems(part: Path, file: Path) -> Iterator[str]:
    if not file.exists():  # a hub's cache has links in the place of files
        yield f"{file} is a link to {file.readlink()}, which is missing"
    elif leads_out(part, file):  # whose copy would be published with the weights
        yield f"{file} is a link out of its folder; copy there what it leads to"
    elif not file.is_dir():
        check_regular(file)
        yield from _damages(file)


def _damages(file: Path) -> Iterator[str]:
    if pointer := lfs_pointer(file):
        yield pointer
    elif file.suffix == ".safetensors":
        try:
            with safe_open(file, "np"):  # it holds the file's length against its header
                pass
        except SafetensorError as error:
            yield f"{file} is damaged or cut off ({error})"
    elif file.suffix == ".json":
        found = _json(file)
        if isinstance(found, Exception):
            yield f"{file} is no JSON ({found})"
        named = found.get("weight_map") if isinstance(found, dict) else None
        for name in sorted(set(map(str, named.values()))) if isinstance(named, dict) else ():
            if Path(name).name != name or not (file.parent / name).exists():
                yield f"{file.parent / name} is missing, which {file.name} names"


def _is_model(part: Path) -> bool:
    """By its configuration, which diffusers' models and transformers' have; a tokenizer may hold a copy of one."""
    file = part / _CONFIG
    if part.name.startswith("tokenizer") or not file.is_file():
        return False
    found = _json(file)
    return isinstance(found, dict) and ("_class_name" in found or "architectures" in found)


def _json(file: Path) -> Any:
    """What it holds; the error where that is no JSON."""
    try:
        return json.loads(read_bytes(file, _LARGEST_JSON))
    except (ValueError, RecursionError) as error:
        return error


def _cloned(file: Path, target: Path) -> bool:
    try:
        with open(file, "rb") as source, open(target, "wb") as copied:
            fcntl.ioctl(copied, _CLONE, source.fileno())
    except OSError:
        return False
    return True
