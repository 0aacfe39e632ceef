"""Runs on emulated cards that are kept, and what decides them."""

from __future__ import annotations

from bigdit.catalog import Gpu
from bigdit.kept import Kept, digest_of
from bigdit.rehearse.card.run import CardRun
from bigdit.rehearse.request import RehearsalRequest
from bigdit.spec import Strict

_KEPT = Kept("cards", CardRun, "the run", "the card is emulated")

# Whose sources decide what a card does: those of the step, and of the card; rules of rehearsals are not among them.
_SOURCES = (
    "spec",
    "emulator",
    "engines",
    "encoders",
    "loader",
    "models",
    "objectives",
    "optim",
    "rehearse/card",
    "rehearse/data.py",
    "rehearse/engines/fsdp2.py",
    "rehearse/steps.py",
    "train/encode.py",
    "train/step.py",
)


def find(gpu: Gpu, asked: RehearsalRequest, build: str) -> CardRun | None:
    """The run that is kept. `build`: of the CUDA environment's torch."""
    return _KEPT.find(decides(gpu, asked, build))


def keep(gpu: Gpu, asked: RehearsalRequest, build: str, run: CardRun) -> None:
    """Keep a run, in place of what was there."""
    _KEPT.keep(decides(gpu, asked, build), run)


def decides(gpu: Gpu, asked: Strict, build: str) -> tuple[str, ...]:
    """All that decides what a card answers."""
    return gpu.model_dump_json(), asked.model_dump_json(), build, digest_of(*_SOURCES)
