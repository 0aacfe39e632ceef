"""Extraction of a run's own pictures, by turns with a loop that opens, crops, encodes and saves them one by one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bigdit.bench.interleaved import Comparison, Load, take_turns
from bigdit.config import RunConfig
from bigdit.config.data import DataConfig
from bigdit.encoders.buckets import bucket_pixels
from bigdit.encoders.codecs import ImageCodec, load_image_codec, to_unit_range
from bigdit.encoders.device import encoding_device
from bigdit.encoders.load import load_text_encoder
from bigdit.encoders.text_encoder import TextEncoder
from bigdit.extract.extract import extract
from bigdit.extract.job import Job
from bigdit.extract.pool import encode_in_workers
from bigdit.extract.speed import read_units
from bigdit.extract.worker import Unit
from bigdit.sources.open import INDEX, open_source
from bigdit.sources.protocol import Item, Source, Unusable
from bigdit.spec import ModelSpec

UNITS = 4
"""Of each worker, at least, where there are pictures enough: the last one's end is then a small part of the whole."""


def bench_extract(
    run: RunConfig,
    model: ModelSpec,
    *,
    pictures: int,
    workers: int,
    rounds: int,
    said: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Pictures a second of both, over the first `pictures` of data.images; what they write is removed.

    Skipped pictures count for both. Raises UserError as extraction does.
    """
    load = Load.now()
    with tempfile.TemporaryDirectory(prefix="bigdit-bench-") as name:
        folder = Path(name)
        data, index = run.data, _index(run.data, folder)
        source = open_source(data.model_copy(update={"features": index.parent}))
        count = min(pictures, len(source))
        part_size = min(data.part_size, -(-count // (UNITS * workers)))
        run = run.model_copy(update={"data": data.model_copy(update={"part_size": part_size, "workers": workers})})
        pool = _Pool(run, model, index, folder, count)
        said("starting workers, loading encoders")
        pool.turn()  # of which the server of workers stays, and files are in the page cache
        naive = _Loop(run, source.items(0, pool.pictures), folder / "loop")
        naive.turn()
        turns = {"a loop, one by one": naive.turn, f"bigdit, {workers} worker{'s' * (workers > 1)}": pool.turn}
        contenders = tuple(take_turns(turns, rounds, said))
    return Comparison(
        what=f"the first {pool.pictures} of {len(source)} pictures, with their captions, in parts of {part_size}",
        unit="image",
        load=load,
        contenders=contenders,
        notes=(
            f"without the start, {pool.start:.1f} s once: imports, processes, encoders",
            f"the loop has {torch.get_num_threads()} threads of torch, each worker one",
            f"{len(naive.captions)} distinct captions: a worker encodes each once, the loop whenever it comes",
        ),
    )


def _index(data: DataConfig, folder: Path) -> Path:
    """Where the indices of tars lie, or are made once: those of the run's own store, where it has them."""
    own = data.features / INDEX
    return own.absolute() if own.is_dir() else folder / INDEX


class _Pool:
    """Extraction into a new store each turn. `start`: seconds of the first turn before the first unit, and after the
    last one."""

    def __init__(self, run: RunConfig, model: ModelSpec, index: Path, folder: Path, end: int) -> None:
        self._run, self._model, self._index, self._folder, self._end = run, model, index, folder, end
        self.pictures = 0
        self.start: float | None = None

    def turn(self) -> float:
        with tempfile.TemporaryDirectory(prefix="store-", dir=self._folder) as name:
            self._index.mkdir(exist_ok=True)
            (Path(name) / INDEX).symlink_to(self._index)
            data = self._run.data.model_copy(update={"features": Path(name)})
            began = time.perf_counter()
            report = extract(self._run.model_copy(update={"data": data}), self._model, end=self._end, engine=_encode)
            whole = time.perf_counter() - began
            units = read_units(Path(name)).values()
        self.pictures = report.pictures
        steady = max(sum(unit.seconds for unit in each) for each in units)
        if self.start is None:
            self.start = whole - steady
        return steady / report.pictures


def _encode(job: Job, source: Source) -> None:
    """As encode_here, without its progress bar."""
    units = (Unit(start, end, source.items(start, end)) for start, end in job.left())
    count = min(job.workers, len(job.left()))
    encode_in_workers(units, count, job.encoders, job.schema, job.data.features, lambda pictures, done: None)


class _Loop:
    """What one would write: picture by picture, in this process, a file each."""

    def __init__(self, run: RunConfig, items: Sequence[Item], folder: Path) -> None:
        device = encoding_device(run.encoders.device)
        self._codec: ImageCodec = load_image_codec(run.encoders.image, device, 1)
        text = run.encoders.text
        self._text: TextEncoder | None = None if text is None else load_text_encoder(text, device, 1)
        self._buckets, self._items, self._folder = run.data.buckets, items, folder
        self.captions: set[str] = set()
        folder.mkdir()

    @torch.no_grad()
    def turn(self) -> float:
        began = time.perf_counter()
        for item in self._items:
            try:
                sample = item.load()
                _, pixels = bucket_pixels(sample.image, self._buckets, self._codec.color)
            except Unusable:
                continue
            latents = self._codec.encode(to_unit_range(torch.tensor(pixels)[None]), [item.index])
            captions = [each.text for each in sample.captions]
            self.captions.update(captions)
            texts = [text.states.cpu() for text in self._text.encode(captions)] if self._text else []
            saved = {"latents": latents.to("cpu", self._codec.stored_dtype), "texts": texts, "label": sample.label}
            torch.save(saved, self._folder / f"{item.index}.pt")
        return (time.perf_counter() - began) / len(self._items)
