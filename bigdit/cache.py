"""Answers on disk: a file for each question, named by all that decides its answer; what is damaged is not believed."""

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


def write_sealed(path: Path, text: str) -> None:
    """Write a text under its SHA-256, as a whole or not at all. Raises UserError where it cannot be written."""
    write_text(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def read_sealed(path: Path) -> bytes:
    """The text that was written. Raises ValueError where the file is not as it was written; OSError."""
    seal, _, text = read_bytes(path).partition(b"\n")
    if seal != hashlib.sha256(text).hexdigest().encode():
        raise ValueError(f"{path} is not as it was written")
    return text


Answer = TypeVar("Answer", bound=BaseModel)


def cache_root() -> Path:
    """BIGDIT_CACHE, or bigdit's folder in the user's cache (XDG base directory specification)."""
    chosen = os.environ.get("BIGDIT_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bigdit"


_NOTICED: set[Path] = set()
"""Folders that could not be written; a plan keeps dozens of answers there."""


@dataclass(frozen=True)
class Cache(Generic[Answer]):
    """One kind of answer, in `folder` of the cache; `what` it is, and what is done `anew`, as notices say it."""

    folder: str
    kind: type[Answer]
    what: str
    anew: str

    def find(self, decides: Iterable[str]) -> Answer | None:
        """The answer that is kept; None where there is none, and with a notice where it is damaged."""
        file = self._file(decides)
        try:
            return self.kind.model_validate_json(read_sealed(file))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError):  # pydantic's among them
            log.notice(f"{file} is damaged, and {self.anew} anew")
            return None

    def keep(self, decides: Iterable[str], answer: Answer) -> None:
        """Keep an answer, in place of what was there; a cache that cannot be written is only noticed, once a folder."""
        try:
            write_sealed(self._file(decides), answer.model_dump_json())
        except UserError as error:
            folder = cache_root() / self.folder
            if folder not in _NOTICED:
                _NOTICED.add(folder)
                log.notice(f"{self.what} is not kept: {error}; said once of {folder}")

    def _file(self, decides: Iterable[str]) -> Path:
        name = hashlib.sha256("|".join(decides).encode()).hexdigest()[:32]
        return cache_root() / self.folder / f"{name}.json"


@functools.cache
def installed() -> str:
    """The versions of what computes answers."""
    return json.dumps(versions(), sort_keys=True)


@functools.cache
def digest_of(*names: str) -> str:
    """A digest of bigdit's source files of these names, and of those in folders of these names: the number of a
    version does not change with each edit."""
    root = Path(bigdit.__file__).parent
    digest = hashlib.sha256()
    for name in names:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".c", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()
