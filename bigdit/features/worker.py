"""The process that encodes: it asks for units, answers with progress, and commits each part itself."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bigdit.config.run import EncodersConfig
from bigdit.errors import UserError
from bigdit.features.in_hand import own_folder
from bigdit.features.load import Encoders, load_encoders
from bigdit.features.part import Encoded, part_path, store_identity, write_part
from bigdit.features.schema import StoreSchema, check_same
from bigdit.features.sources import Item
from bigdit.features.speed import Stopwatch, UnitSpeed, append
from bigdit.features.unit import encode_unit


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
    """So many more pictures of the unit are encoded or skipped."""

    pictures: int


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
    torch.set_num_threads(1)
    try:
        loaded = load_encoders(encoders, number)
        found = {"codec": loaded.image.identity, "text_encoder": loaded.text.identity}
        check_same(root, schema, schema.model_copy(update=found))
        with own_folder(root) as folder:
            _work_through(pipe, root, folder, schema, loaded)
        pipe.send(Finished())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except UserError as error:
        pipe.send(Failed(error.problems))
    except Exception:
        pipe.send(Failed((), traceback.format_exc()))


def _work_through(pipe: Connection, root: Path, folder: Path, schema: StoreSchema, encoders: Encoders) -> None:
    """Encode one unit while the one before it is written."""
    writing: Future[UnitSpeed] | None = None
    identity = store_identity(schema)
    with ThreadPoolExecutor(1, thread_name_prefix="writer") as writer:
        while (unit := _next_unit(pipe)) is not None:
            watch = Stopwatch()
            _mark(folder, part_path(root, unit.start, unit.end).name)
            encoded = encode_unit(
                unit.items, schema.buckets, encoders.image, encoders.text, lambda n: pipe.send(Progress(n)), watch
            )
            if writing is not None:
                with watch.at("waiting"):
                    pipe.send(Done(writing.result()))
            speed = watch.stop(unit.start, unit.end, str(encoders.device))
            writing = writer.submit(_commit, root, folder, encoded, speed, identity)
        if writing is not None:
            pipe.send(Done(writing.result()))


def _next_unit(pipe: Connection) -> Unit | None:
    pipe.send(Ready())
    unit: Unit | None = pipe.recv()
    return unit


def _mark(folder: Path, name: str) -> None:
    """Say in the store what is in hand."""
    try:
        (folder / name).touch()
    except OSError as error:
        raise UserError(f"cannot write {folder / name}: {error.strerror}") from None


def _commit(root: Path, folder: Path, encoded: Encoded, unit: UnitSpeed, identity: str) -> UnitSpeed:
    """Write a part in place of its mark, move it to its place in the store, and note its speed."""
    began = time.perf_counter()
    path = part_path(root, unit.start, unit.end)
    write_part(path, encoded, folder, identity=identity)
    written = unit.model_copy(update={"writing_s": time.perf_counter() - began})
    append(root, folder.name, written)
    return written
