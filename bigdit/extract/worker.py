"""The worker process, which requests units, reports progress and commits each part; and the server that forks it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from bigdit.catalog.families import FILL, LOSS_MASK, REFERENCE
from bigdit.config.data import EncodersConfig, frames_of
from bigdit.encoders.latents import bucket_pixels, fill_mask, mask_latents
from bigdit.encoders.load import Encoders, load_encoders
from bigdit.encoders.protocol import masked_out, to_unit_range
from bigdit.errors import UserError
from bigdit.files import cannot_write
from bigdit.libraries import switched_on
from bigdit.processes import end_with_parent, undisturbed
from bigdit.sources.protocol import Caption, Item, Unusable
from bigdit.store.lease import own_folder
from bigdit.store.part import EditShape, EncodedRange, PartWriter, Shape, Skipped, part_path
from bigdit.store.report import Stopwatch, UnitSpeed, append
from bigdit.store.schema import Classes, StoreSchema, check_same, part_identity, store_identity
from bigdit.store.store import write_null_text
from bigdit.store.text import Text, TextKey, lengths_of, summed, text_key


@dataclass(frozen=True)
class Unit:
    """The source range [start, end) and its images."""

    start: int
    end: int
    items: Sequence[Item]


@dataclass(frozen=True)
class Ready:
    """The worker requests a unit. The reply None ends it."""


@dataclass(frozen=True)
class Progress:
    """So many more `images` of the unit are encoded or skipped. Of these, `skipped` are skipped."""

    images: int
    skipped: int


@dataclass(frozen=True)
class Note:
    """A message. It is logged once, even if several workers send it."""

    text: str


@dataclass(frozen=True)
class Done:
    """The part of a unit is committed."""

    speed: UnitSpeed


@dataclass(frozen=True)
class Finished:
    """The worker's last message: all its units are committed."""


@dataclass(frozen=True)
class Failed:
    """The worker failed, with the `problems` of a user's error, or with the traceback of a bug."""

    problems: tuple[str, ...]
    bug: str | None = None


def work(pipe: Connection, number: int, encoders: EncodersConfig, schema: StoreSchema, root: Path) -> None:
    """Encode the units from `pipe` in one thread, and write in another. Parallelism comes from several workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the parent ends its workers
    end_with_parent()
    torch.set_num_threads(1)
    try:
        loaded = load_encoders(encoders, number, lambda text: pipe.send(Note(text)), schema.references)
        first = loaded.first_frame
        found = {
            "codec": loaded.image.identity,
            "text_encoder": loaded.text.identity if loaded.text else {},
            "first_frame": loaded.of_images(lambda: first.identity) if first else None,
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
    """Encode each unit while the one before it is written."""
    committed: deque[UnitSpeed] = deque()  # the writer's thread fills it, since only this thread may use the pipe
    with PartWriter(eight_bits=schema.text_encoder.get("stored") == "fp8") as writer:
        watch = Stopwatch()
        while (unit := _request_unit(pipe, committed)) is not None:
            path = part_path(root, unit.start, unit.end)
            _mark(folder, path)
            encoding = UnitEncoder(encoders, schema, watch)
            for progress in encoding.encode(unit.items):
                pipe.send(progress)
            encoded = encoding.encoded()
            speed = watch.stop(unit.start, unit.end, len(encoded.skipped), str(encoders.device))
            watch = Stopwatch()  # the wait for the writer counts for the next unit
            record = functools.partial(_record, root, folder.name, speed, committed)
            with watch.at("waiting"):
                writer.write(path, encoded, part_identity(schema, unit.start), folder, record)
    _send_done(pipe, committed)


def _request_unit(pipe: Connection, committed: deque[UnitSpeed]) -> Unit | None:
    _send_done(pipe, committed)
    pipe.send(Ready())
    unit: Unit | None = pipe.recv()
    return unit


def _send_done(pipe: Connection, committed: deque[UnitSpeed]) -> None:
    while committed:
        pipe.send(Done(committed.popleft()))


def _mark(folder: Path, path: Path) -> None:
    """Lease a range. Creates the file in the worker's folder into which the part is written later."""
    try:
        (folder / path.name).touch()
    except OSError as error:
        raise cannot_write(path, error) from None


def _record(root: Path, worker: str, speed: UnitSpeed, committed: deque[UnitSpeed], writing_s: float) -> None:
    """Record the speed of a unit that is on disk. Runs in the writer's thread."""
    written = speed.model_copy(update={"writing_s": writing_s})
    append(root, worker, written)
    committed.append(written)


DROPPED = Caption("", 2.0**-126)
"""The last caption of a sample whose texts depend on its images. It replaces a dropped caption. Its weight is the least
of fp32, so it is not chosen among the others."""

_Group = tuple[tuple[int, ...], int]
"""Samples that are encoded together: their bucket in pixels, and their number of references."""


class UnitEncoder:
    """Encodes the items of one unit: latents, texts or classes, first frames, references or masked images.

    Skips unusable items. Encodes all images before the captions, in the turn of their encoders. `watch` adds up the
    seconds of `reading` and `encoding`. For fill models, masks say which pixels are painted. Otherwise they weigh the
    loss. Edits with fewer references than the store's have their own shapes.
    """

    def __init__(self, encoders: Encoders, schema: StoreSchema, watch: Stopwatch) -> None:
        self._encoders, self._schema, self._editor = encoders, schema, schema.editor
        self._classes = None if schema.classes is None else Classes(schema.classes)
        self._watch = watch
        self._seen: dict[int, list[Image.Image]] = {}
        self._waiting: dict[_Group, list[npt.NDArray[np.uint8]]] = defaultdict(list)
        self._references: dict[_Group, list[npt.NDArray[np.uint8]]] = defaultdict(list)
        self._fill_masks: dict[_Group, list[torch.Tensor]] = defaultdict(list)
        self._latents: dict[Shape, list[torch.Tensor]] = defaultdict(list)
        self._frames: dict[Shape, list[dict[str, torch.Tensor]]] = defaultdict(list)
        self._indices: dict[Shape, list[int]] = defaultdict(list)
        self._captions: dict[int, tuple[Caption, ...]] = {}
        self._names: dict[int, str] = {}
        self._contents: dict[int, tuple[int, int]] = {}
        self._labels: dict[int, int] = {}
        self._masks: dict[Shape, list[torch.Tensor]] = defaultdict(list)
        self._masked = False
        self._skipped: list[Skipped] = []

    def encode(self, items: Sequence[Item]) -> Iterator[Progress]:
        """Encode the items' images, for `encoded`. Yields after each batch and each unusable item."""
        for item in items:
            group = self._read(item)
            if group is None:
                yield Progress(1, 1)
            elif len(self._waiting[group]) * frames_of(group[0]) >= self._encoders.image.batch_size:
                yield self._encode(group)
        for group in list(self._waiting):
            yield self._encode(group)

    def encoded(self) -> EncodedRange:
        """The features of all items. Encodes their captions; call it only once."""
        with self._watch.at("encoding"):
            texts = self._texts()
        frames = {
            shape: {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
            for shape, batches in self._frames.items()
        }
        if self._masked:
            frames = {
                shape: frames.get(shape, {}) | {LOSS_MASK: torch.stack(masks)} for shape, masks in self._masks.items()
            }
        return EncodedRange(
            {shape: torch.cat(batches) for shape, batches in self._latents.items()},
            self._indices,
            self._captions,
            texts,
            self._skipped,
            self._labels if self._classes else None,
            frames or None,
            summed(replace(cut, samples=[name]) for name, text in self._named(texts) for cut in text.cuts),
            self._contents,
            lengths_of((name, length) for name, text in self._named(texts) for length in text.lengths),
        )

    def _texts(self) -> dict[TextKey, Text]:
        """The texts of all captions. If they depend on images, each sample has its own, and last that of DROPPED."""
        text = self._encoders.text
        if self._classes or text is None:
            return {}
        if not self._editor.seen:
            distinct = list(dict.fromkeys(caption.text for each in self._captions.values() for caption in each))
            return dict(zip(distinct, text.encode(distinct), strict=True))
        self._captions = {index: (*each, DROPPED) for index, each in self._captions.items()}
        keys = [
            (index, text) for index, each in self._captions.items() for text in dict.fromkeys(one.text for one in each)
        ]
        encoded = text.encode([caption for _, caption in keys], images=[self._seen[index] for index, _ in keys])
        return dict(zip(keys, encoded, strict=True))

    def _read(self, item: Item) -> _Group | None:
        """Read an item, and return its group. Records an unusable item as skipped, and returns None."""
        codec = self._encoders.image
        try:
            with self._watch.at("reading"):
                contents = item.read()
                self._contents[item.index] = contents.digests()
                sample = contents.sample()
                bucket, pixels = bucket_pixels(
                    sample.image, sample.fit.buckets or self._schema.buckets, codec.color, sample.fit
                )
                size = self._editor.resized(*bucket[-2:])
                references = [bucket_pixels(each, [size], codec.color, sample.fit)[1] for each in sample.references]
                if self._classes:
                    self._labels[item.index] = self._classes.of(sample)
        except Unusable as error:
            self._skipped.append(Skipped(item.index, item.name, str(error)))
            return None
        if not self._classes:
            self._captions[item.index], self._names[item.index] = sample.captions, item.name
        if self._editor.seen:
            self._seen[item.index] = [Image.fromarray(pixels.transpose(1, 2, 0)) for pixels in references]
        group = bucket, len(references)
        shape = self._shape(group)
        self._indices[shape].append(item.index)
        if self._schema.fill:
            self._fill_masks[group].append(fill_mask(sample, bucket, item.index))
        else:
            self._masked |= sample.mask is not None
            self._masks[shape].append(mask_latents(sample, bucket, shape))
        self._waiting[group].append(pixels)
        self._references[group] += references
        return group

    def _shape(self, group: _Group) -> Shape:
        """The shape of the latents of a group."""
        bucket, references = group
        shape = self._encoders.image.latent_shape(bucket)
        return shape if references == self._schema.references else EditShape(shape, references)

    def _encode(self, group: _Group) -> Progress:
        codec, first, turn = self._encoders.image, self._encoders.first_frame, self._encoders.of_images
        with self._watch.at("encoding"):
            images = torch.from_numpy(np.stack(self._waiting.pop(group)))
            pixels = to_unit_range(images)
            shape = self._shape(group)
            indices = self._indices[shape][-len(pixels) :]
            # Convolutions may return channels_last memory. Files have rows of [C, H, W].
            encoded = turn(lambda: codec.encode(pixels, indices)).to("cpu", codec.stored_dtype).contiguous()
            if first is not None:
                self._frames[shape].append(turn(lambda: first.encode(images)))
            if references := self._references.pop(group, []):
                before = to_unit_range(torch.from_numpy(np.stack(references)))
                found = turn(lambda: codec.encode_mode(before)).to("cpu", torch.bfloat16).contiguous()
                self._frames[shape].append({REFERENCE: found.unflatten(0, (len(encoded), -1))})
            if masks := self._fill_masks.pop(group, []):
                mask = torch.stack(masks)
                self._frames[shape].append({FILL: turn(lambda: masked_out(codec, pixels, mask))})
        self._latents[shape].append(encoded)
        return Progress(len(encoded), 0)

    def _named(self, texts: Mapping[TextKey, Text]) -> Iterator[tuple[str, Text]]:
        """The name of each image, and the text of each of its captions."""
        for index, captions in self._captions.items():
            for caption in captions:
                if caption is not DROPPED:
                    yield self._names[index], texts[text_key(texts, index, caption.text)]


_LONGEST = 107 - len("/pymp-12345678/listener-12345678")
"""The most bytes of the path of a folder in which multiprocessing makes sockets. Source: unix(7); arbitrary_address in
multiprocessing/connection.py, Python 3.11."""


def server() -> ForkServerContext:
    """The server that forks processes for encoding and verification. It ignores Ctrl-C.

    torch's threads and locks do not survive a fork of this process. A server that has only imported the libraries
    starts workers at once, and they share its memory. With a GPU it imports nothing, since some libraries, such as
    torchao, initialise CUDA when they are imported. CUDA does not survive a fork either.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([] if torch.cuda.is_available() else ["bigdit.extract.preload"])
    _find_room_for_sockets()
    resource_tracker.ensure_running()  # its start unblocks signals
    with undisturbed(), switched_on("PYTHONSAFEPATH"):  # see processes.own_module
        forkserver.ensure_running()
    return context


def _find_room_for_sockets() -> None:
    """Make sockets in TMPDIR, or in /tmp if its path is too long for them."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST:
        return
    configured, tempfile.tempdir = tempfile.tempdir, "/tmp"
    try:
        util.get_temp_dir()  # made once in a process, and removed at its end
    finally:
        tempfile.tempdir = configured
