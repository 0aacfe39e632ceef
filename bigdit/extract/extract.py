"""Encode a run's pictures and captions into its store: what is missing, in parallel, each part once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bigdit.catalog.conditions import class_count, class_misfits, condition_problems, first_frame_misfits, takes_classes
from bigdit.config.run import RunConfig
from bigdit.encoders.codecs import ImageCodec, load_image_codec
from bigdit.encoders.first_frame import load_first_frames
from bigdit.encoders.fit import latent_misfits, size_misfits, text_misfits
from bigdit.encoders.load import load_text_encoder
from bigdit.encoders.text_encoder import TextEncoder, shapes_of
from bigdit.errors import UserError
from bigdit.extract.changes import check_unchanged, write_listings
from bigdit.extract.job import Job, encode_here
from bigdit.extract.ranges import missing, parse_split
from bigdit.extract.report import FILE as REPORT
from bigdit.extract.report import ExtractReport, StoreReport, extract_report, store_report
from bigdit.files import write_text
from bigdit.sources.open import SourceList, open_source
from bigdit.sources.protocol import Source
from bigdit.spec import ModelSpec
from bigdit.store.in_hand import own_folder, remove_left
from bigdit.store.null_text import write_null_text
from bigdit.store.part import Shape
from bigdit.store.remote import url_of
from bigdit.store.schema import Range, StoreSchema, claim, store_identity

Engine = Callable[[Job, Source], None]
"""Completes a job, by processes of this machine or of others. Raises UserError where it cannot."""


def extract(
    run: RunConfig,
    model: ModelSpec,
    workers: int | None = None,
    *,
    start: int | None = None,
    end: int | None = None,
    shard: str | None = None,
    engine: Engine = encode_here,
    only: Sequence[Range] | None = None,
) -> ExtractReport:
    """Complete the store of `run`, or the parts that start in source indices [start, end) or in shard k/n, or `only`
    some, with `workers` processes (of each task of an engine), data.workers by default. The same call goes on.

    Raises UserError where pictures, encoders, buckets, model and store do not go together, the disk cannot be
    written, a worker dies, or every picture was skipped.
    """
    began = time.perf_counter()
    root = run.data.features
    if root is None:
        raise UserError("strategy.features is online: each step encodes, and nothing is extracted; set it to cached")
    if url_of(root) is not None:
        raise UserError(
            f"data.features: {url_of(root)} is read, and not extracted to; extract into a folder, and copy it there"
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
        with own_folder(root) as folder:  # a worker has written it, unless there was nothing to encode
            write_null_text(root, lambda: load_text_encoder(text).null(), store_identity(schema), folder)
    whole = not missing(root, schema.ranges())
    store = _whole(root, schema, changed=bool(wanted)) if whole else None
    return extract_report(root, wanted, time.perf_counter() - began, store)


def _prepare(run: RunConfig, model: ModelSpec, source: SourceList) -> StoreSchema:
    """Load the encoders once to name them, check what hangs together, and claim the store."""
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
    """Of each bucket that the codec takes; and why it takes others not."""
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
    """What of latents, texts or classes the model does not take."""
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
    """The report of a whole store, and its file, which an extraction that found nothing to do leaves as it is."""
    report = store_report(root, schema)
    if changed or not (root / REPORT).exists():
        with own_folder(root) as folder:
            # Not by pydantic, which writes no path that is not UTF-8.
            write_text(root / REPORT, json.dumps(report.model_dump(mode="json"), indent=2) + "\n", folder)
    if not report.encoded:
        first = report.skipped[0]
        # Of a table labels are taken for numbers where nothing names the classes.
        names = ", or name the classes in data.classes" if isinstance(schema.classes, int) else ""
        raise UserError(
            f"data.images: no picture of {report.pictures} can be used, the first {first.name}: "
            f"{first.reason}; mend them{names}, delete {root}, and run again"
        )
    return report
