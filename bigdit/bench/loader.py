"""The loader on a run's own store, by turns with torch's DataLoader over the same samples, in the same order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

import torch
from torch.utils.data import DataLoader, Dataset

from bigdit.bench.interleaved import Comparison, Load, take_turns
from bigdit.config import RunConfig
from bigdit.config.data import DataConfig
from bigdit.dist import World
from bigdit.loader.batch import Batch
from bigdit.loader.order import Order
from bigdit.loader.padded import padded
from bigdit.loader.read import draw
from bigdit.loader.stream import FeatureStream
from bigdit.store import FeatureStore
from bigdit.store.part import Shape
from bigdit.store.text import Text
from bigdit.units import gib, how_many

Place = tuple[Shape, int, int, int]
"""A sample's bucket, part, row and seed."""

Sample = tuple[torch.Tensor, Text | int]
"""Latents and the text of a caption, or a class, as they are stored."""


def bench_loader(
    run: RunConfig, *, batches: int, rounds: int, said: Callable[[str], None] = lambda line: None
) -> Comparison:
    """Micro-batches a second of both in turns of `batches`, with data.read_threads threads, or processes, each.

    No caption is dropped, so that both read the same bytes. Raises UserError where the store cannot be opened.
    """
    load, threads, pinned = Load.now(), run.data.read_threads, torch.cuda.is_available()
    store = FeatureStore.open(run.data.features, run.data.reader, run.data.remote_cache)
    size, last = run.train.micro_batch_size, batches * (rounds + 1)
    stream = stream_of(run, store, caption_dropout=0.0, pinned=pinned)
    tokens = {name: most for name, (most, _) in store.text_shapes.items()}
    naive = data_loader(run.data, (places(stream, step) for step in range(last)), tokens, pinned=pinned)
    with closing(stream.steps(0, last)) as steps:
        turns = {
            f"torch DataLoader, {how_many(threads, 'process')}": lambda: _seconds(naive, batches),
            f"bigdit, {how_many(threads, 'thread')}": lambda: _seconds(steps, batches),
        }
        for turn in turns.values():  # starts threads and processes, opens files, brings them into the page cache
            turn()
        contenders = tuple(take_turns(turns, rounds, said))
    rows = ", ".join(f"{len(rows)} of {' × '.join(map(str, shape))}" for shape, rows in store.buckets.items())
    return Comparison(
        what=f"micro-batches of {how_many(size, 'sample')} from {store.root}, {batches} a turn",
        unit="batch",
        load=load,
        contenders=contenders,
        notes=(
            f"samples: {rows}; {gib(int(store.index.parts[:, 2].sum()))} of parts, which the page cache keeps where "
            "there is memory for them",
        ),
    )


def stream_of(run: RunConfig, store: FeatureStore, *, caption_dropout: float, pinned: bool) -> FeatureStream:
    """The trainer's own stream over a run's store, of one process and one micro-batch a step."""
    size = run.train.micro_batch_size
    return FeatureStream(
        store,
        World(),
        Order(store.index.counts, store.index.shapes, size, run.train.seed),
        micro_batch_size=size,
        grad_accum_steps=1,
        seed=run.train.seed,
        caption_dropout=caption_dropout,
        read_ahead_steps=run.data.read_ahead_steps,
        threads=run.data.read_threads,
        pin_memory=pinned,
    )


def places(stream: FeatureStream, step: int) -> list[Place]:
    """Where the samples of a step's only micro-batch lie, and their seeds."""
    [(bucket, parts, rows, seeds)] = stream.samples(step)
    return [(bucket, *place) for place in zip(parts.tolist(), rows.tolist(), seeds, strict=True)]


def data_loader(
    data: DataConfig, batches: Iterator[Sequence[Place]], max_tokens: Mapping[str, int], *, pinned: bool
) -> Iterator[Sequence[torch.Tensor]]:
    """What one would write: a dataset that reads a sample, and torch's loader, whose processes stack and pad them.

    `max_tokens`: of each sequence of a text, as FeatureStore.text_shapes names them; none of classes.
    """
    return iter(
        DataLoader(
            _Samples(data),
            batch_sampler=batches,
            num_workers=data.read_threads,
            collate_fn=_Collated(max_tokens) if max_tokens else _stacked,
            pin_memory=pinned,
        )
    )


class _Samples(Dataset[Sample]):
    """The store's samples, by their places; each process opens the store for itself."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._store: FeatureStore | None = None

    def __getitem__(self, place: Place) -> Sample:
        if self._store is None:
            self._store = FeatureStore.open(self._data.features, self._data.reader, self._data.remote_cache)
        bucket, number, row, seed = place
        part = self._store.part(number)
        _, latents = part.latents(bucket, row)
        if self._store.has_deviation:
            mean, deviation = latents.float()
            latents = torch.randn(bucket).mul_(deviation).add_(mean)
        if part.labels:
            return latents, int(part.labels[bucket][row])
        return latents, part.text(part.choose_caption(bucket, row, draw(seed, b"caption")))


def _stacked(samples: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """Samples as the tensors of a batch: latents and labels."""
    return [torch.stack([latents for latents, _ in samples]), torch.tensor([label for _, label in samples])]


class _Collated:
    """Samples as the tensors of a batch: latents, text, mask, and what stands beside the text."""

    def __init__(self, max_tokens: Mapping[str, int]) -> None:
        self._max_tokens = max_tokens

    def __call__(self, samples: Sequence[tuple[torch.Tensor, Text]]) -> list[torch.Tensor]:
        text, mask, extras = padded([text for _, text in samples], self._max_tokens)
        return [torch.stack([latents for latents, _ in samples]), text, mask, *extras.values()]


def _seconds(source: Iterator[Sequence[Batch]] | Iterator[Sequence[torch.Tensor]], batches: int) -> float:
    """Of a batch, over so many."""
    began = time.perf_counter()
    for _ in range(batches):
        next(source)  # and it is let go, as by a step that has copied it
    return (time.perf_counter() - began) / batches
