"""What a run has left in its output, whether it has ended or trains still."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from bigdit.config.output import CHECKPOINTS, EXPORTS, METRICS, RECEIPT, RECORD, SAMPLES
from bigdit.documents import read_json
from bigdit.errors import UserError
from bigdit.receipt import Receipt
from bigdit.train.record import RunRecord, read_rows

_STEP = re.compile(r"step-([0-9]{8,})(?:\.png)?")

Row = dict[str, Any]
Kept = TypeVar("Kept", RunRecord, Receipt)


@dataclass(frozen=True)
class Found:
    """Rows of metrics; what the run is (None of one that an earlier bigdit trained) and its receipt (None before its
    end); names of checkpoints and exports, and files of pictures by the step after which they were drawn."""

    output: Path
    rows: list[Row]
    record: RunRecord | None
    receipt: Receipt | None
    checkpoints: list[str]
    exports: list[str]
    pictures: dict[int, Path]
    notices: list[str]

    @property
    def steps(self) -> int:
        """How many were taken."""
        return int(self.rows[-1]["step"])

    @property
    def wanted(self) -> int | None:
        """How many are to be taken; None where that is not known."""
        return None if self.record is None else self.record.steps or self.record.run.train.known_steps

    @functools.cached_property
    def borders(self) -> dict[int, str]:
        """How many steps are finished when stages after the first begin, and their names."""
        pairs = zip(self.rows, self.rows[1:], strict=False)
        return {
            after["step"] - 1: f"stages.{after['stage']}"
            for before, after in pairs
            if before.get("stage") != after.get("stage") and isinstance(after.get("stage"), int)
        }

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of the rows that have a finite number under this key."""
        return self._columns.get(key, [])

    def last(self, key: str) -> float | None:
        """The newest of these numbers."""
        return self.series(key)[-1][1] if self.series(key) else None

    @functools.cached_property
    def _columns(self) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for row in self.rows:
            step = row["step"]
            for key, value in row.items():
                if type(value) in (int, float) and math.isfinite(value):
                    found.setdefault(key, []).append((step, value))
        return found


def read_run(output: Path) -> Found:
    """What lies in `output`. Raises UserError where no run has left rows there; what of the rest is damaged is left
    out, and said among the notices."""
    path = output / METRICS
    try:
        rows, lost = read_rows(path)
    except OSError as error:
        raise UserError(f"report: {path} cannot be read: {error.strerror}") from None
    if not rows:
        why = "has no row that can be read" if path.is_file() else "does not exist"
        raise UserError(
            f"report: {path} {why}; the output of a run (its config's output) that has taken ten steps, or all, was "
            "expected"
        )
    notices = [f"{lost} of {len(rows) + lost} lines of {path} hold no row and are left out"] if lost else []
    record = _read(output / RECORD, RunRecord, notices)
    receipt = _read(output / RECEIPT, Receipt, notices)
    if not _is_of(receipt, record, rows):
        receipt = None
    names = {folder: sorted(_names(output / folder)) for folder in (CHECKPOINTS, EXPORTS, SAMPLES)}
    pictures = {step: output / SAMPLES / name for step, name in names[SAMPLES] if name.endswith(".png")}
    checkpoints, exports = ([name for _, name in names[folder]] for folder in (CHECKPOINTS, EXPORTS))
    return Found(output, rows, record, receipt, checkpoints, exports, pictures, notices)


def _read(path: Path, kind: type[Kept], notices: list[str]) -> Kept | None:
    """What is kept in a file; None where there is none, or it is damaged, which is a notice."""
    try:
        return kind.model_validate(read_json(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        (first, *_) = error.errors()
        why = f"is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except ValueError as error:
        why = f"is damaged: it is {error}"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    notices.append(f"{path} {why}; what it says is left out")
    return None


def _is_of(receipt: Receipt | None, record: RunRecord | None, rows: list[Row]) -> bool:
    """Whether a receipt is of the last start, which then has come to its end: a run that goes on leaves the old one."""
    return receipt is not None and (record is None or record.start + receipt.steps == rows[-1]["step"])


def _names(folder: Path) -> Iterator[tuple[int, str]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if name := _STEP.fullmatch(path.name):
            yield int(name[1]), path.name
