"""The process that encodes: it asks for units, answers with progress, and commits each part itself."""

from __future__ import annotations

import functools
import signal
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bigdit.config.data import EncodersConfig
from bigdit.die_with_parent import end_with_parent
from bigdit.encoders.load import Encoders, load_encoders
from bigdit.errors import UserError
from bigdit.extract.speed import Stopwatch, UnitSpeed, append
from bigdit.extract.unit import encode_unit
from bigdit.sources.protocol import Item
from bigdit.store.classes import Classes
from bigdit.store.in_hand import own_folder
from bigdit.store.null_text import write_null_text
from bigdit.store.part import part_path
from bigdit.store.schema import StoreSchema, check_same, part_identity, store_identity
from bigdit.store.writer import PartWriter


@dataclass(frozen=True)
class Unit:
    """The source range [start, end) and its pictures."""

    start: int
    end: int
    items: Sequence[Item]


@dataclass(frozen=True)
class Ready:
    """The worker wants a unit; None instead of one ends it."""


@dataclass(frozen=True)
class Progress:
    """So many more pictures of the unit are encoded or skipped, of which so many are skipped."""

    pictures: int
    skipped: int


@dataclass(frozen=True)
class Note:
    """A line that people should read once, however many workers say it."""

    text: str


@dataclass(frozen=True)
class Done:
    """The part of a unit is committed."""

    speed: UnitSpeed


@dataclass(frozen=True)
class Finished:
    """All that the worker was given is committed: its last word."""


@dataclass(frozen=True)
class Failed:
    """The worker gave up: `problems` of a user's error, or the traceback of a bug."""

    problems: tuple[str, ...]
    bug: str | None = None


def work(pipe: Connection, number: int, encoders: EncodersConfig, schema: StoreSchema, root: Path) -> None:
    """Encode the units that `pipe` gives. One thread, and one that writes: the workers are the parallelism."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    end_with_parent()
    torch.set_num_threads(1)
    try:
        loaded = load_encoders(encoders, number, lambda text: pipe.send(Note(text)))
        first = loaded.first_frame
        found = {
            "codec": loaded.image.identity,
            "text_encoder": loaded.text.identity if loaded.text else {},
            "first_frame": loaded.of_pictures(lambda: first.identity) if first else None,
        }
        check_same(root, schema, schema.model_copy(update=found))
        with own_folder(root) as folder:
            if loaded.text is not None:
                write_null_text(root, loaded.text.null, store_identity(schema), folder)
            _work_through(pipe, root, folder, schema, loaded)
        pipe.send(Finished())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except UserError as error:
        pipe.send(Failed(error.problems))
    except Exception:
        pipe.send(Failed((), traceback.format_exc()))


def _work_through(pipe: Connection, root: Path, folder: Path, schema: StoreSchema, encoders: Encoders) -> None:
    """Encode units while those before them are written."""
    committed: deque[UnitSpeed] = deque()  # by the writer's thread; this one alone talks through the pipe
    condition = encoders.text if schema.classes is None else Classes(schema.classes)
    assert condition is not None
    with PartWriter(eight_bits=schema.text_encoder.get("stored") == "fp8") as writer:
        clock = _WriterClock()
        watch = Stopwatch()
        while (unit := _next_unit(pipe, committed)) is not None:
            path = part_path(root, unit.start, unit.end)
            _mark(folder / path.name)
            told, first = lambda *counts: pipe.send(Progress(*counts)), encoders.first_frame
            turn = encoders.of_pictures
            encoded = encode_unit(unit.items, schema.buckets, encoders.image, condition, told, watch, first, turn)
            speed = watch.stop(unit.start, unit.end, len(encoded.skipped), str(encoders.device))
            watch = Stopwatch()  # waiting for the writer is a part of the next unit's time
            note = functools.partial(_note, root, folder.name, speed, clock, time.perf_counter(), committed)
            with watch.at("waiting"):
                writer.write(path, encoded, part_identity(schema, unit.start), folder, note)
    _tell(pipe, committed)


def _next_unit(pipe: Connection, committed: deque[UnitSpeed]) -> Unit | None:
    _tell(pipe, committed)
    pipe.send(Ready())
    unit: Unit | None = pipe.recv()
    return unit


def _tell(pipe: Connection, committed: deque[UnitSpeed]) -> None:
    while committed:
        pipe.send(Done(committed.popleft()))


def _mark(path: Path) -> None:
    """Say in the store what is in hand; the part is written in place of it."""
    try:
        path.touch()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


@dataclass
class _WriterClock:
    """When the writer ended its last part: it began the next one then, or when it was given that."""

    ended: float = 0.0


def _note(
    root: Path, worker: str, speed: UnitSpeed, clock: _WriterClock, given: float, committed: deque[UnitSpeed]
) -> None:
    """In the writer's thread: keep the speed of a unit that is on disk."""
    began, clock.ended = max(given, clock.ended), time.perf_counter()
    written = speed.model_copy(update={"writing_s": clock.ended - began})
    append(root, worker, written)
    committed.append(written)
