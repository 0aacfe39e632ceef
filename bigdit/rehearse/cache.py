"""Rehearsals on disk: a file for each question, named by all that decides its answer."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import bigdit
from bigdit import log
from bigdit.errors import UserError, versions
from bigdit.rehearse.request import RehearsalRequest, RehearsedSize
from bigdit.sealed import read_sealed, write_sealed

# Whose sources decide what a rehearsal finds.
_SOURCES = (
    "spec.py",
    "engines",
    "encoders",
    "loader",
    "memory",
    "models",
    "objectives",
    "optim",
    "record",
    "rehearse",
    "train/encode.py",
    "train/step.py",
)


def folder() -> Path:
    """BIGDIT_CACHE, or bigdit's folder in the user's cache (XDG base directory specification)."""
    chosen = os.environ.get("BIGDIT_CACHE")
    if chosen:
        return Path(chosen) / "rehearsals"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bigdit" / "rehearsals"


def find(request: RehearsalRequest, micro_batch_size: int) -> RehearsedSize | None:
    """The rehearsal that is kept for this micro-batch size; None where there is none, and with a notice where it is
    damaged."""
    file = _file(request, micro_batch_size)
    try:
        return RehearsedSize.model_validate_json(read_sealed(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):  # pydantic's among them
        log.notice(f"{file} is damaged, and the step is rehearsed anew")
        return None


def keep(request: RehearsalRequest, size: RehearsedSize) -> None:
    """Keep a rehearsal, in place of what was there; a cache that cannot be written is only noticed."""
    try:
        write_sealed(_file(request, size.micro_batch_size), size.model_dump_json())
    except UserError as error:
        log.notice(f"the rehearsal is not kept: {error}")


def _file(request: RehearsalRequest, micro_batch_size: int) -> Path:
    question = request.model_copy(update={"micro_batch_sizes": (micro_batch_size,)})
    strategy = question.strategy.with_micro_batch_size(micro_batch_size)
    question = question.model_copy(update={"strategy": strategy})
    decides = [question.model_dump_json(), json.dumps(_versions(), sort_keys=True), sources()]
    return folder() / f"{hashlib.sha256('|'.join(decides).encode()).hexdigest()[:32]}.json"


@functools.cache
def _versions() -> dict[str, str]:
    return versions()


@functools.cache
def sources() -> str:
    """A digest of the sources: the number of a version does not change with each edit."""
    return digest_of(_SOURCES)


def digest_of(names: Sequence[str]) -> str:
    """A digest of bigdit's source files of these names, and of those in folders of these names."""
    root = Path(bigdit.__file__).parent
    digest = hashlib.sha256()
    for name in names:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".c", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()
