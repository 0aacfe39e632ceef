"""Encode a run's images and captions into its store: the missing parts, in parallel, each once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bigdit import log
from bigdit.catalog.conditions import (
    class_count,
    condition_problems,
    fill_channels,
    fill_misfits,
    first_frame_misfits,
    takes_classes,
)
from bigdit.catalog.families import EDITED, MOST_ASPECT, editor_of
from bigdit.config.data import written_bucket
from bigdit.config.run import RunConfig
from bigdit.encoders.fit import size_misfits, unfit_model
from bigdit.encoders.load import load_first_frames, load_image_codec, load_text_encoder
from bigdit.encoders.protocol import ImageCodec, TextEncoder
from bigdit.errors import UserError
from bigdit.extract.job import Job, encode_here, parse_split
from bigdit.files import write_text
from bigdit.sources.open import SourceList, open_source
from bigdit.store.changes import (
    Items,
    commit_growth,
    grow,
    latest_schema,
    numbered,
    remove_old_listings,
    write_listings,
)
from bigdit.store.files import url_of
from bigdit.store.lease import missing, own_folder, remove_left
from bigdit.store.part import Shape
from bigdit.store.report import FILE as REPORT
from bigdit.store.report import ExtractReport, StoreReport, extract_report, store_report
from bigdit.store.schema import Range, StoreSchema, claim, store_identity
from bigdit.store.store import write_null_text
from bigdit.strategy import ModelSpec

RunJob = Callable[[Job, Items], None]
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
    by_content: bool = False,
) -> ExtractReport:
    """Complete the store of `run`. Calling it again resumes it, and encodes what changed in the sources.

    Only parts that start in source indices [start, end) or in shard k/n, or those of `only`, are encoded. `workers`:
    the processes, of each task of an engine; data.workers by default. `by_content`: all files are compared with the
    store, also where names, sizes and times agree.

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
    parse_split(len(source), start, end, shard)  # before the encoders are loaded
    schema = _prepare(run, model, source, by_content)
    first, last = parse_split(schema.count, start, end, shard)
    chosen = None if only is None else tuple(only)
    job = Job(run.data, run.encoders, schema, (first, last), chosen, workers or run.data.workers, Path.cwd())
    wanted = job.left()
    if wanted:
        engine(job, numbered(root, schema, source))
    if (text := run.encoders.text) is not None:
        null = lambda: load_text_encoder(text, references=run.data.references).null()  # noqa: E731
        with own_folder(root) as folder:  # a worker wrote it, unless no part was missing
            write_null_text(root, null, store_identity(schema), folder)
    whole = not missing(root, schema.ranges())
    if whole and schema == latest_schema(root):
        commit_growth(root, schema)
        remove_old_listings(root, schema)
    store = _whole(root, schema, changed=bool(wanted)) if whole else None
    return extract_report(root, wanted, time.perf_counter() - began, store)


def _prepare(run: RunConfig, model: ModelSpec, source: SourceList, by_content: bool) -> StoreSchema:
    """Load the encoders for their identities, check that everything fits together, and claim the store.

    Returns its schema, with the changes of the sources.
    """
    codec, text = load_image_codec(run.encoders.image), run.encoders.text
    text_encoder = None if text is None else load_text_encoder(text, references=run.data.references)
    frames = load_first_frames(run.encoders.first_frame, codec, torch.device("cpu"))
    first_frame = None if frames is None else frames.identity
    classes = (source.class_names or class_count(model)) if takes_classes(model) else None
    shapes, unfit = _latent_shapes(run, codec)
    fill = fill_channels(codec.channels, codec.downsample) if run.data.fill else 0
    problems = [
        *unfit,
        *unfit_model(model, codec, text_encoder, classes),
        *_unfit_frames(model, codec, text_encoder, first_frame),
        *(f"encoders.image gives {misfit}" for misfit in fill_misfits(model, fill)),
        *_unfit_references(run, codec, text_encoder),
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
        references=run.data.references,
        min_references=run.data.min_references,
        fill=fill,
    )
    root = run.data.store
    remove_left(root)
    if (found := latest_schema(root)) is None:
        claim(root, schema)
        write_listings(root, schema, source)
        return schema
    grown, lines = grow(root, found, schema, source, by_content=by_content)
    for line in lines:
        log.notice(line)
    return grown


def _latent_shapes(run: RunConfig, codec: ImageCodec) -> tuple[list[Shape], list[str]]:
    """The latents' shapes of the buckets, and why the codec cannot encode others."""
    shapes: list[Shape] = []
    problems: list[str] = []
    for key, buckets in run.data.keyed_buckets.items():
        for bucket in buckets:
            try:
                shapes.append(codec.latent_shape(bucket))
            except UserError as error:
                problems += [each.replace("data.buckets", key, 1) for each in error.problems]
    return shapes, problems


def _unfit_frames(
    model: ModelSpec, codec: ImageCodec, text: TextEncoder | None, found: dict[str, Any] | None
) -> list[str]:
    tokens = None if text is None else text.max_tokens
    return [f"encoders gives {misfit}" for misfit in first_frame_misfits(model, codec.channels, found, tokens)]


def _unfit_references(run: RunConfig, codec: ImageCodec, text: TextEncoder | None) -> list[str]:
    """Why the pipeline that encodes captions cannot edit images of these buckets."""
    named = None if text is None else text.identity.get("class_name")
    editor = editor_of(named)
    if not run.data.references or editor.area is None:
        return []
    if run.strategy.controlnet is not None:
        return [
            f"the text encoder of {named} reads the images to edit, and those of a ControlNet are none; take its base"
        ]
    if 0 in run.data.reference_counts:
        return [f"data.min_references is 0, and the text encoder of {named} reads the images to edit; set it to 1"]
    if codec.downsample != EDITED:
        return [f"encoders.image has {codec.downsample} pixels a side of a latent, and {named} takes {EDITED}"]
    long = [each for each in run.data.all_buckets if max(each[-2:]) > MOST_ASPECT * min(each[-2:])]
    return [
        f"data.buckets has {written_bucket(each)}; with {named} a side is at most {MOST_ASPECT} times the other"
        for each in long
    ]


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
