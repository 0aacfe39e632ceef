"""Rehearsals that are kept, and what decides their answers."""

from __future__ import annotations

from bigdit.kept import Kept, digest_of, installed
from bigdit.rehearse.request import RehearsalRequest, RehearsedSize

_KEPT = Kept("rehearsals", RehearsedSize, "the rehearsal", "the step is rehearsed")

# Whose sources decide what a rehearsal finds.
_SOURCES = (
    "objective_spec.py",
    "spec",
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


def find(request: RehearsalRequest, micro_batch_size: int) -> RehearsedSize | None:
    """The rehearsal that is kept for this micro-batch size."""
    return _KEPT.find(_decides(request, micro_batch_size))


def keep(request: RehearsalRequest, size: RehearsedSize) -> None:
    """Keep a rehearsal, in place of what was there."""
    _KEPT.keep(_decides(request, size.micro_batch_size), size)


def sources() -> str:
    """A digest of the sources."""
    return digest_of(*_SOURCES)


def _decides(request: RehearsalRequest, micro_batch_size: int) -> tuple[str, ...]:
    strategy = request.strategy.with_micro_batch_size(micro_batch_size)
    question = request.model_copy(update={"micro_batch_sizes": (micro_batch_size,), "strategy": strategy})
    return question.model_dump_json(), installed(), sources()
