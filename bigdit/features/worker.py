"""The process that encodes: it is sent units, answers with progress, and commits each part itself."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bigdit.config.run import EncodersConfig
from bigdit.errors import UserError
from bigdit.features.codecs import load_image_codec
from bigdit.features.encoders.text import T5TextEncoder
from bigdit.features.part import part_path, write_part
from bigdit.features.sources import Item
from bigdit.features.unit import encode_unit


@dataclass(frozen=True)
class Unit:
    """The source range [start, end) and its pictures."""

    start: int
    end: int
    items: Sequence[Item]


@dataclass(frozen=True)
class Progress:
    """So many more pictures of the unit are encoded or skipped."""

    pictures: int


@dataclass(frozen=True)
class Done:
    """The part of a unit of so many pictures is committed, after `seconds` of work on it."""

    pictures: int
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The worker gave up: `problems` of a user's error, or the traceback of a bug."""

    problems: tuple[str, ...]
    bug: str | None = None


def work(pipe: Connection, encoders: EncodersConfig, buckets: Sequence[tuple[int, int]], root: Path) -> None:
    """Encode units from `pipe` until it closes or sends None. One thread: the workers are the parallelism."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    torch.set_num_threads(1)
    try:
        codec, text_encoder = load_image_codec(encoders.image), T5TextEncoder(encoders.text)
        while (unit := pipe.recv()) is not None:
            began = time.perf_counter()
            encoded = encode_unit(unit.items, buckets, codec, text_encoder, lambda n: pipe.send(Progress(n)))
            write_part(part_path(root, unit.start, unit.end), encoded)
            pipe.send(Done(len(unit.items), time.perf_counter() - began))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except UserError as error:
        pipe.send(Failed(error.problems))
    except Exception:
        pipe.send(Failed((), traceback.format_exc()))
