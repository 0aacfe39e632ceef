"""A cache of answers on disk: one file each, named by a digest of all inputs. Damaged files are ignored."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel

import bigdit
from bigdit import log
from bigdit.errors import UserError, versions
from bigdit.files import read_bytes, write_text


def write_checksummed(path: Path, text: str) -> None:
    """Write a text with its SHA-256, all or nothing. Raises UserError if that fails."""
    write_text(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def read_checksummed(path: Path) -> bytes:
    """The text that `write_checksummed` wrote. Raises ValueError if it was changed; OSError."""
    checksum, _, text = read_bytes(path).partition(b"\n")
    if checksum != hashlib.sha256(text).hexdigest().encode():
        raise ValueError(f"{path} was changed")
    return text


Answer = TypeVar("Answer", bound=BaseModel)


VARIABLE = "BIGDIT_CACHE"


def cache_root() -> Path:
    """BIGDIT_CACHE, or bigdit's folder in the user's cache (XDG base directory specification)."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bigdit"


_NOTICED: set[Path] = set()
"""Folders that could not be written, and were logged."""


@dataclass(frozen=True)
class Cache(Generic[Answer]):
    """One kind of answer, in `folder` of the cache. `what` and `making` name it and its computation in notices."""

    folder: str
    kind: type[Answer]
    what: str
    making: str

    def find(self, key: Iterable[str]) -> Answer | None:
        """The answer; None if it is missing or damaged, which is logged."""
        file = self._file(key)
        try:
            return self.kind.model_validate_json(read_checksummed(file))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError):  # pydantic's error is a ValueError
            log.notice(f"{file} is damaged, and {self.making} again")
            return None

    def keep(self, key: Iterable[str], answer: Answer) -> None:
        """Store an answer. A folder that cannot be written is logged once."""
        try:
            write_checksummed(self._file(key), answer.model_dump_json())
        except UserError as error:
            folder = cache_root() / self.folder
            if folder not in _NOTICED:
                _NOTICED.add(folder)
                log.notice(f"{self.what} is not cached: {error}; logged once for {folder}")

    def _file(self, key: Iterable[str]) -> Path:
        name = hashlib.sha256("|".join(key).encode()).hexdigest()[:32]
        return cache_root() / self.folder / f"{name}.json"


def installed() -> str:
    """What answers depend on here: versions of libraries, and variables that choose kernels or workspaces."""
    chosen = {name: value for name, value in os.environ.items() if name.startswith(_CHOOSING)}
    chosen.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it when it first compiles, and it chooses nothing
    return json.dumps(versions() | chosen, sort_keys=True)


_CHOOSING = ("CUBLAS", "DIFFUSERS_ATTN", "NVIDIA_TF32", "PYTORCH_NO_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_")
"""How the names of these variables begin. The allocator's settings are not among them: each attempt sets its own."""


@functools.cache
def digest_of(*names: str) -> str:
    """A digest of bigdit's source files and folders of these names: a version number does not change with each edit."""
    root = Path(bigdit.__file__).parent
    digest = hashlib.sha256()
    for name in names:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".c", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()
