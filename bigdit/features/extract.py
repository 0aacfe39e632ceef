"""Encode a run's pictures and captions into its store: what is missing, in parallel, each part once."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from bigdit import log
from bigdit.config.run import RunConfig
from bigdit.errors import UserError
from bigdit.features.codecs import ImageCodec, load_image_codec
from bigdit.features.encoders.text import T5TextEncoder
from bigdit.features.null_text import write_null_text
from bigdit.features.part import part_path
from bigdit.features.pool import Worker, encode_in_workers
from bigdit.features.report import FILE as REPORT
from bigdit.features.report import ExtractReport, make_report
from bigdit.features.schema import StoreSchema, claim
from bigdit.features.sources import Source, open_source
from bigdit.features.unit import TEXT_DTYPE
from bigdit.features.worker import Unit
from bigdit.files import TEMPORARY, write_text
from bigdit.spec import ModelSpec

ABANDONED_S = 3600  # a part is written in seconds: an older temporary file has lost its process


def extract(run: RunConfig, model: ModelSpec, workers: int | None = None) -> ExtractReport:
    """Complete the store of `run` with `workers` processes, data.workers by default; the same call goes on.

    Raises UserError where pictures, encoders, buckets, model and store do not go together, the disk cannot be
    written, a worker dies, or every picture was skipped.
    """
    began = time.perf_counter()
    source = open_source(run.data)
    root = run.data.features
    schema = _prepare(run, model, source)
    missing = [(start, end) for start, end in schema.ranges() if not part_path(root, start, end).exists()]
    done = _encode(run, source, missing, min(workers or run.data.workers, len(missing))) if missing else []
    report = make_report(root, schema, done, time.perf_counter() - began)
    if missing or not (root / REPORT).exists():  # a run that found nothing to do has no speeds to tell
        write_text(root / REPORT, report.model_dump_json(indent=2) + "\n")
    if not report.encoded:
        first = report.skipped[0]
        raise UserError(
            f"data.images: all {report.pictures} pictures were skipped, the first {first.name}: "
            f"{first.reason}; mend them, delete {root}, and run again"
        )
    return report


def _prepare(run: RunConfig, model: ModelSpec, source: Source) -> StoreSchema:
    """Load the encoders once to name them, check what hangs together, and claim the store."""
    codec, text_encoder = load_image_codec(run.encoders.image), T5TextEncoder(run.encoders.text)
    problems = [*_unfit_buckets(run, codec), *_unfit_model(model, codec, text_encoder)]
    if problems:
        raise UserError(*problems)
    schema = StoreSchema(
        codec=codec.identity,
        text_encoder=text_encoder.identity,
        buckets=list(run.data.buckets),
        source=source.identity,
        part_size=run.data.part_size,
    )
    claim(run.data.features, schema)
    _remove_abandoned(run.data.features)
    write_null_text(run.data.features, text_encoder.encode([""])[0].to(TEXT_DTYPE))
    return schema


def _unfit_buckets(run: RunConfig, codec: ImageCodec) -> list[str]:
    side = codec.downsample
    return [
        f"data.buckets: {height} × {width} does not divide by {side}, the pixels a side of one latent; "
        f"nearest: {max(round(height / side), 1) * side} × {max(round(width / side), 1) * side}"
        for height, width in run.data.buckets
        if height % side or width % side
    ]


def _unfit_model(model: ModelSpec, codec: ImageCodec, text_encoder: T5TextEncoder) -> list[str]:
    problems = []
    channels, width = model.kwargs.get("in_channels"), model.kwargs.get("caption_channels")
    if channels not in (None, codec.channels):
        problems.append(f"encoders.image gives {codec.channels} channels, and the model's in_channels is {channels}")
    if width not in (None, text_encoder.dim):
        problems.append(f"encoders.text gives {text_encoder.dim} features, and the model's caption_channels is {width}")
    return problems


def _remove_abandoned(root: Path) -> None:
    """Delete what killed processes left half-written; a younger file may be another extraction's."""
    for temporary in root.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):  # it was that extraction's, and has its final name by now
            if time.time() - temporary.stat().st_mtime > ABANDONED_S:
                temporary.unlink()


def _encode(run: RunConfig, source: Source, missing: list[tuple[int, int]], workers: int) -> list[Worker]:
    """Encode the missing ranges behind a progress bar on stderr."""
    units = (Unit(start, end, source.items(start, end)) for start, end in missing)
    with log.progress("extract", total=sum(end - start for start, end in missing), unit="images") as advance:
        return encode_in_workers(units, workers, run.encoders, run.data.buckets, run.data.features, advance)
