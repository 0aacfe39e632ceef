"""Encode a run's images and captions into its store: the missing parts, in parallel, each once.

The store has a listing of each source, with names, sizes and times of its files, which shows changes. It can be deleted
at any time. If only a time differs, as after a copy, the files are read, and their digests compared with the parts'.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from bigdit import log
from bigdit.catalog.conditions import class_count, class_misfits, condition_problems, first_frame_misfits, takes_classes
from bigdit.config.run import RunConfig
from bigdit.encoders.first_frame import load_first_frames
from bigdit.encoders.fit import latent_misfits, size_misfits, text_misfits
from bigdit.encoders.load import load_image_codec, load_text_encoder
from bigdit.encoders.protocol import ImageCodec, TextEncoder, shapes_of
from bigdit.errors import UserError, shown
from bigdit.extract.job import Job, encode_here, parse_split
from bigdit.extract.report import FILE as REPORT
from bigdit.extract.report import ExtractReport, StoreReport, extract_report, store_report
from bigdit.files import replacing, write_text
from bigdit.sources.open import INDEX, SourceList, open_source
from bigdit.sources.protocol import Entry, Item, Source, Unusable
from bigdit.store.files import url_of
from bigdit.store.lease import missing, own_folder, remove_left
from bigdit.store.part import Shape, part_path
from bigdit.store.reader import Part
from bigdit.store.schema import EXTRACT, Range, StoreSchema, claim, part_identity, read_schema, store_identity
from bigdit.store.store import write_null_text
from bigdit.strategy import ModelSpec

RunJob = Callable[[Job, Source], None]
"""Completes a job by processes of this machine or of others. Raises UserError on failure."""


def extract(
    run: RunConfig,
    model: ModelSpec,
    workers: int | None = None,
    *,
    start: int | None = None,
    end: int | None = None,
    shard: str | None = None,
    engine: RunJob = encode_here,
    only: Sequence[Range] | None = None,
) -> ExtractReport:
    """Complete the store of `run`. Calling it again resumes it.

    Only parts that start in source indices [start, end) or in shard k/n, or those of `only`, are encoded. `workers`:
    the processes, of each task of an engine; data.workers by default.

    Raises UserError if images, encoders, buckets, model and store do not fit together, the disk cannot be written, a
    worker dies, or every image was skipped.
    """
    began = time.perf_counter()
    root = run.data.features
    if root is None:
        raise UserError("strategy.features is online: each step encodes, and nothing is extracted; set it to cached")
    if url_of(root) is not None:
        raise UserError(
            f"data.features: extraction cannot write to {url_of(root)}; extract into a folder, and copy it there"
        )
    if problems := condition_problems(run, model):
        raise UserError(*problems)
    source = open_source(run.data)
    first, last = parse_split(len(source), start, end, shard)
    schema = _prepare(run, model, source)
    chosen = None if only is None else tuple(only)
    job = Job(run.data, run.encoders, schema, (first, last), chosen, workers or run.data.workers, Path.cwd())
    wanted = job.left()
    if wanted:
        engine(job, source)
    if (text := run.encoders.text) is not None:
        with own_folder(root) as folder:  # a worker wrote it, unless no part was missing
            write_null_text(root, lambda: load_text_encoder(text).null(), store_identity(schema), folder)
    whole = not missing(root, schema.ranges())
    store = _whole(root, schema, changed=bool(wanted)) if whole else None
    return extract_report(root, wanted, time.perf_counter() - began, store)


def _prepare(run: RunConfig, model: ModelSpec, source: SourceList) -> StoreSchema:
    """Load the encoders for their identities, check that everything fits together, and claim the store."""
    codec, text = load_image_codec(run.encoders.image), run.encoders.text
    text_encoder = None if text is None else load_text_encoder(text)
    frames = load_first_frames(run.encoders.first_frame, codec, torch.device("cpu"))
    first_frame = None if frames is None else frames.identity
    classes = (source.class_names or class_count(model)) if takes_classes(model) else None
    shapes, unfit = _latent_shapes(run, codec)
    problems = [
        *unfit,
        *unfit_model(model, codec, text_encoder, classes),
        *_unfit_frames(model, codec, text_encoder, first_frame),
        *(f"data.buckets gives {misfit}" for misfit in size_misfits(model, shapes)),
    ]
    if problems:
        raise UserError(*problems)
    schema = StoreSchema(
        codec=codec.identity,
        text_encoder=text_encoder.identity if text_encoder else {},
        buckets=list(run.data.buckets),
        sources=source.identity["sources"],
        part_size=run.data.part_size,
        classes=classes,
        fps=run.data.fps,
        first_frame=first_frame,
    )
    root = run.data.store
    check_unchanged(root, schema, source)
    claim(root, schema)
    write_listings(root, source)
    remove_left(root)
    return schema


def _latent_shapes(run: RunConfig, codec: ImageCodec) -> tuple[list[Shape], list[str]]:
    """The latents' shapes of the buckets, and why the codec cannot encode others."""
    shapes: list[Shape] = []
    problems: list[str] = []
    for bucket in run.data.buckets:
        try:
            shapes.append(codec.latent_shape(bucket))
        except UserError as error:
            problems += error.problems
    return shapes, problems


def unfit_model(
    model: ModelSpec, codec: ImageCodec, text: TextEncoder | None, classes: list[str] | int | None
) -> list[str]:
    """Why the model cannot take the latents, texts or classes."""
    latents = [f"encoders.image gives {misfit}" for misfit in latent_misfits(model, codec.channels)]
    if text is not None:
        return [
            *latents,
            *(f"encoders.text gives {each}" for each in text_misfits(model, shapes_of(text), text.pooled_dim)),
        ]
    return [*latents, *(f"data.images has {misfit}" for misfit in class_misfits(model, classes or []))]


def _unfit_frames(
    model: ModelSpec, codec: ImageCodec, text: TextEncoder | None, found: dict[str, Any] | None
) -> list[str]:
    tokens = None if text is None else text.max_tokens
    return [f"encoders gives {misfit}" for misfit in first_frame_misfits(model, codec.channels, found, tokens)]


def _whole(root: Path, schema: StoreSchema, *, changed: bool) -> StoreReport:
    """The report of a complete store. Its file is written if parts `changed`."""
    report = store_report(root, schema)
    if changed or not (root / REPORT).exists():
        with own_folder(root) as folder:
            # pydantic cannot write paths that are not UTF-8.
            write_text(root / REPORT, json.dumps(report.model_dump(mode="json"), indent=2) + "\n", folder)
    if not report.encoded:
        first = report.skipped[0]
        # Without names of classes, labels of a table must be numbers.
        names = ", or name the classes in data.classes" if isinstance(schema.classes, int) else ""
        raise UserError(
            f"data.images: none of {report.images} images can be used, the first {first.name}: "
            f"{first.reason}; fix them{names}, delete {root}, and run again"
        )
    return report


_NAMED = 3  # names of each kind of change
_ENTRY = TypeAdapter(tuple[str, int, str, str, str], config={"strict": True})
_DAMAGED = OSError, EOFError, ValueError, zlib.error
_READERS = 8  # parts whose files are read in parallel


@dataclass
class _Changes:
    """Names of items that were added, removed and edited. `touched`: ranges of items that may have been edited."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    touched: list[Range] = field(default_factory=list)


def check_unchanged(root: Path, schema: StoreSchema, source: SourceList) -> None:
    """Raise UserError, with the changes, if files of the sources changed since the store at `root` was encoded.

    Files of missing parts may change.
    """
    found = read_schema(root)
    if found is None or _without_sources(found) != _without_sources(schema):
        return  # claim() reports the differences
    pairs = list(zip(found.sources, schema.sources, strict=False))
    same, first, problems = all(before == now for before, now in pairs), 0, list[str]()
    for number, (before, now) in enumerate(pairs):
        inner = source.sources[number]
        changes = _compared(_listing(root, number), inner)
        if same:
            touched = [(first + start, first + end) for start, end in changes.touched]
            changes = _Changes(edited=_edited(root, found, source, touched))
        if (same or before != now) and (changes.added or changes.removed or changes.edited):
            problems.append(_message(root, number, changes))
        first += len(inner)
    if problems:
        raise UserError(*problems)


def _without_sources(schema: StoreSchema) -> StoreSchema:
    """A schema without its sources, as it would be read from a file."""
    return StoreSchema.model_validate_json(schema.model_copy(update={"sources": []}).model_dump_json())


def write_listings(root: Path, source: SourceList) -> None:
    """Write the listings of sources that changed."""
    for number, inner in enumerate(source.sources):
        path = _listing(root, number)
        if not _is_listed(path, inner):
            with replacing(path) as temporary, gzip.open(temporary, "wt", compresslevel=1) as file:
                file.writelines(map(_line, inner.entries()))


def _listing(root: Path, number: int) -> Path:
    return root / INDEX / f"source-{number}.jsonl.gz"


def _line(entry: Entry) -> str:
    return json.dumps(astuple(entry)) + "\n"


def _is_listed(path: Path, source: Source) -> bool:
    with contextlib.suppress(*_DAMAGED), gzip.open(path, "rt") as file:
        return all(before == now for before, now in itertools.zip_longest(file, map(_line, source.entries())))
    return False


def _listed(path: Path) -> list[Entry]:
    """The entries of a listing; none if it is missing or damaged."""
    with contextlib.suppress(*_DAMAGED), gzip.open(path, "rt") as file:
        return [Entry(*_ENTRY.validate_json(line)) for line in file]
    return []


def _compared(path: Path, source: Source) -> _Changes:
    """The changes of a source since its listing. Without a listing, all items are touched."""
    if _is_listed(path, source):
        return _Changes()
    before = dict(_numbered(_listed(path)))
    if not before:
        return _Changes(touched=[(0, len(source))])
    changes, end = _Changes(), 0
    for key, now in _numbered(source.entries()):
        start, end = end, end + now.count
        then = before.pop(key, None)
        if then is None:
            changes.added.append(now.name)
        elif replace(then, times=now.times) != now:
            captions_alone = (then.count, then.image) == (now.count, now.image)
            changes.edited.append(f"the caption of {now.name}" if captions_alone else now.name)
        elif then != now:
            changes.touched.append((start, end))
    changes.removed = [name for name, _ in before]
    return changes


def _numbered(entries: Iterable[Entry]) -> Iterator[tuple[tuple[str, int], Entry]]:
    """Entries with unique keys: files of several folders may have the same name."""
    seen: Counter[str] = Counter()
    for entry in entries:
        yield (entry.name, seen[entry.name]), entry
        seen[entry.name] += 1


def _edited(root: Path, schema: StoreSchema, source: SourceList, touched: Sequence[Range]) -> list[str]:
    """The items in the `touched` ranges that are not those of their parts. Raises UserError if one cannot be read, or a
    part is damaged."""
    ranges = schema.ranges()
    absent = set(missing(root, ranges))
    asked: dict[Range, list[int]] = {}
    parts = iter([each for each in ranges if each not in absent])
    part = next(parts, None)
    for index in itertools.chain.from_iterable(itertools.starmap(range, touched)):
        while part is not None and part[1] <= index:
            part = next(parts, None)
        if part is not None and part[0] <= index:
            asked.setdefault(part, []).append(index)
    if not asked:
        return []

    def edited(each: Range) -> list[str]:
        content = Part.open(part_path(root, *each), identity=part_identity(schema, each[0])).content
        items = source.items(*each)
        names = (_edit(items[index - each[0]], content[index - each[0]].tolist()) for index in asked[each])
        return [name for name in names if name is not None]

    found: list[str] = []
    with ThreadPoolExecutor(_READERS, "compare") as threads, log.progress("compare", len(asked), "parts") as advance:
        for names in threads.map(edited, asked):
            found += names
            advance(1)
    return found


def _edit(item: Item, known: list[int]) -> str | None:
    """The name of an item, or of its caption, if it is not as its digests say."""
    try:
        image, captions = item.read().digests()
    except Unusable:
        image, captions = 0, 0
    if [image, captions] == known:
        return None
    return item.name if image != known[0] else f"the caption of {item.name}"


def _message(root: Path, number: int, changes: _Changes) -> str:
    """One line with the changes and the fix."""
    kinds = (("added", changes.added), ("removed", changes.removed), ("edited", changes.edited))
    listed = "; ".join(f"{len(names)} {what}: {_first(names)}" for what, names in kinds if names)
    again = f"to encode all again, set another data.features, or delete {root}; then {EXTRACT}"
    line = f"data.features: {root} was encoded before data.images[{number}] changed: {listed}; "
    if changes.removed or changes.edited:
        return line + again
    return f"{line}to encode only these, move them to a folder of their own, and append it to data.images; {again}"


def _first(names: Sequence[str]) -> str:
    return shown(", ".join(names[:_NAMED])).replace("\n", "\\n") + (", …" if len(names) > _NAMED else "")
