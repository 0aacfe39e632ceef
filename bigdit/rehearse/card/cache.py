"""Runs on emulated cards, on disk: a file for each question, named by all that decides its answer."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from bigdit import log
from bigdit.catalog import Gpu
from bigdit.rehearse import cache
from bigdit.rehearse.card.run import CardRun
from bigdit.rehearse.request import RehearsalRequest
from bigdit.sealed import read_sealed, write_sealed

# Whose sources decide what a card does: those of the step, and of the card; rules of rehearsals are not among them.
_SOURCES = (
    "spec.py",
    "emulator",
    "engines",
    "encoders",
    "loader",
    "models",
    "objectives",
    "optim",
    "rehearse/card",
    "rehearse/data.py",
    "rehearse/steps.py",
    "train/encode.py",
    "train/step.py",
)


def find(gpu: Gpu, asked: RehearsalRequest, build: str) -> CardRun | None:
    """The run that is kept; None where there is none, and with a notice where it is damaged. `build`: of the CUDA
    environment's torch."""
    file = _file(gpu, asked, build)
    try:
        return CardRun.model_validate_json(read_sealed(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):  # pydantic's among them
        log.notice(f"{file} is damaged, and the card is emulated anew")
        return None


def keep(gpu: Gpu, asked: RehearsalRequest, build: str, run: CardRun) -> None:
    """Keep a run, in place of what was there. Raises UserError where the folder cannot be written."""
    write_sealed(_file(gpu, asked, build), run.model_dump_json())


def _file(gpu: Gpu, asked: RehearsalRequest, build: str) -> Path:
    decides = "|".join((gpu.model_dump_json(), asked.model_dump_json(), build, sources()))
    return cache.folder().parent / "cards" / f"{hashlib.sha256(decides.encode()).hexdigest()[:32]}.json"


@functools.cache
def sources() -> str:
    """A digest of the sources."""
    return cache.digest_of(_SOURCES)
