"""The data of a stage: a store, checked against model, encoders and plan; or images, encoded in each step."""

from __future__ import annotations

import errno
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bigdit.catalog.context import context_misfits
from bigdit.catalog.families import FAMILIES, no_class
from bigdit.checkpoint import Peers
from bigdit.config.check import has_store, paths
from bigdit.config.data import DataConfig
from bigdit.config.plan_file import PlanFile
from bigdit.config.run import RunConfig
from bigdit.config.stages import of_each
from bigdit.dist import World
from bigdit.encoders.components import lacking
from bigdit.encoders.fit import smaller_than_planned, store_misfits
from bigdit.errors import UserError
from bigdit.loader.online import RawStore, RunEncoders, more_than_planned, open_online
from bigdit.loader.order import Order
from bigdit.loader.stages import none_left
from bigdit.loader.stream import FeatureStream, FirstFrameChanges
from bigdit.sampling.conditions import asked_image, class_numbers
from bigdit.sources.open import check_sources, kind_of, open_source
from bigdit.store import FeatureStore
from bigdit.store.changes import not_encoded
from bigdit.store.files import url_of
from bigdit.store.report import caption_lines, written_report
from bigdit.store.text import cut_line, summed
from bigdit.strategy import BatchShape, ModelSpec, Strategy
from bigdit.train.prepare import Prepared
from bigdit.train.resume import Start
from bigdit.train.step import Encode, encode


def check_data(stages: Sequence[Prepared]) -> list[str]:
    """Check each stage's store, or else its sources, as far as this machine has them.

    Returns lines about what is missing, sources that changed since they were encoded, and the lengths of captions.
    """

    def one(each: Prepared) -> list[str]:
        data, encoders = each.run.data, each.run.encoders.model_dump()
        absent = [f"{key} {path}" for key, path in paths(encoders, "encoders") if not path.exists()]
        absent += lacking(each.run.encoders)
        if data.features is None:  # features online
            open_source(data)
            return [f"missing, and each step needs it: {', '.join(absent)}"] if absent else []
        stored = has_store(data)
        if stored:
            open_store(each.run, each.spec, each.plan)
        elsewhere = url_of(data.features) is not None
        above = next((each for each in (data.features, *data.features.parents) if os.path.exists(each)), None)
        if not elsewhere and above is not None and not above.is_dir():
            raise UserError(
                f"data.features: cannot write {data.features}: {os.strerror(errno.ENOTDIR)}; choose another"
            )
        missing = check_sources(data, listed=not stored and not elsewhere)
        if stored and not missing:
            return [*_outdated(data), *_lengths(data)]
        if stored or elsewhere:
            return []
        lines = [f"{data.features} holds no latents, and no source was checked: {'; '.join(missing)}"]
        needed = [f"missing, and `bigdit extract` needs it to fill {data.features}: {', '.join(absent)}"]
        return [*(lines if missing else []), *(needed if absent else [])]

    return list(dict.fromkeys(line for lines in of_each(stages, one) for line in lines))


def _outdated(data: DataConfig) -> list[str]:
    """A line for each source that changed since it was encoded, if all can be listed. Writes nothing."""
    try:
        if any(kind_of(each, "data.images") == "webdataset" for each in data.images):
            return []
        return not_encoded(data.store, open_source(data))
    except UserError:  # training reads the store alone
        return []


def _lengths(data: DataConfig) -> list[str]:
    """The lengths of captions of a store on this machine, and how many were truncated."""
    report = None if url_of(data.store) is not None else written_report(data.store)
    return [] if report is None else caption_lines(report)


def open_store(run: RunConfig, spec: ModelSpec, plan: PlanFile | None) -> FeatureStore:
    """The store of a run. Raises UserError if its features do not fit the model, the run or the plan.

    Also if validation takes all samples, samples.captions names no class, or samples.images cannot be read.
    """
    store = FeatureStore.open(run.data.store, run.data.reader, run.data.remote_cache)
    tokens = 0 if store.text_shape is None else store.text_shape[0]
    if problems := store_misfits(run, spec, plan, store):
        raise UserError(*(f"data.features: {store.root} does not fit: {problem}" for problem in problems))
    edited = map(store.schema.editor.latents, store.buckets) if store.schema.references else ()
    split = context_misfits(spec, run.strategy.cp, [*store.buckets, *edited], None if tokens == 0 else tokens)
    too_few = none_left(store, run.validation.samples) if run.validation is not None else []
    if problems := [*split, *too_few, *_sample_problems(run, store)]:
        raise UserError(*problems)
    return store


def _sample_problems(run: RunConfig, store: FeatureStore) -> Iterator[str]:
    """What is wrong with samples.captions that name no class of the store, and samples.images that cannot be read."""
    if run.samples is None:
        return
    labels = [("samples.captions", each) for each in run.samples.captions]
    checks: list[Callable[[], object]] = []
    if store.schema.classes is not None:
        checks.append(functools.partial(class_numbers, store.schema.classes, labels))
    for path in run.samples.images:
        checks.append(functools.partial(asked_image, "samples.images:", path, run.data.max_pixels, run.data.fill))
    for check in checks:
        try:
            check()
        except UserError as error:
            yield from error.problems


def largest_batch_shape(store: FeatureStore | RawStore) -> BatchShape:
    """The shapes of a store's largest bucket, with text of max_tokens if it has text."""
    latents = max(store.buckets, key=math.prod)
    wide = store.has_deviation or store.latents_dtype == torch.float32
    shape = BatchShape(latents=latents, latents_dtype="fp32" if wide else "bf16", text=store.text_shape)
    if isinstance(store, RawStore):
        return shape
    given: dict[str, Any] = {"references": store.schema.references, "first_frame": store.schema.first_frame is not None}
    if store.schema.references and (reference := store.schema.editor.latents(latents)) != shape.latents:
        given["reference"] = reference
    return shape.model_copy(update=given)


@dataclass(frozen=True)
class TrainData:
    """The samples of a `store` in an `order`. `encoders`: None unless each step encodes its samples."""

    store: FeatureStore | RawStore
    encoders: RunEncoders | None
    order: Order

    def cut_here(self) -> list[str]:
        """A line for each tokenizer that truncated captions in this process."""
        return [] if self.encoders is None else [cut_line(cut, self.encoders.captions) for cut in self.encoders.cuts]

    def cut(self, peers: Peers, cp: int) -> list[str]:
        """As cut_here, for all processes, which all call this; `cp` of them share a sample."""
        if self.encoders is None:
            return []
        found = peers.gather((self.encoders.captions, self.encoders.cuts))[::cp]
        captions = sum(count for count, _ in found)
        return [cut_line(cut, captions) for cut in summed(cut for _, cuts in found for cut in cuts)]

    def encode(self, strategy: Strategy) -> Encode | None:
        """The function that encodes a micro-batch in the step; None with a store of features."""
        return None if self.encoders is None else functools.partial(encode, self.encoders, strategy.encode_chunk)

    def stream(self, stage: Prepared, strategy: Strategy, world: World, device: torch.device) -> FeatureStream:
        """This process's micro-batches of a stage."""
        run = stage.run
        return FeatureStream(
            self.store,
            world.of_samples(strategy.cp),
            self.order,
            micro_batch_size=strategy.micro_batch_size,
            grad_accum_steps=strategy.grad_accum_steps,
            seed=run.train.seed,
            caption_dropout=run.data.caption_dropout,
            first_frames=FirstFrameChanges(run.data.first_frame_dropout, run.data.first_frame_noise),
            no_class=no_class(stage.spec),
            loss_weights=[source.loss_weight for source in run.data.images],
            by_text=FAMILIES[stage.spec.class_name].by_text,
            read_ahead_steps=strategy.read_ahead_steps,
            threads=run.data.read_threads,
            pin_memory=device.type == "cuda",
        )


def open_data(start: Start, device: torch.device) -> tuple[TrainData, list[str]]:
    """The data of the current stage, with encoders on the device; and notices.

    Raises UserError if it does not fit the run, the model, the plan or the checkpoint.
    """
    stage, strategy = start.stage, start.stage.strategy
    store: FeatureStore | RawStore
    if strategy.features == "cached":
        from_here = start.stages[stage.number :]  # stores of later stages are checked too
        stores = of_each(from_here, lambda each: open_store(each.run, each.spec, each.plan), first=stage.number)
        store, encoders = stores[0], None
    else:
        store, encoders = open_online(
            stage.run, stage.spec, stage.plan, device, strategy.encode_chunk or strategy.micro_batch_size
        )
        tokens = None if store.text_shape is None else store.text_shape[0]
        if problems := context_misfits(stage.spec, strategy.cp, store.buckets, tokens):
            raise UserError(*problems)
    order, notices = start.order(store)
    if stage.plan is not None:
        notices += smaller_than_planned(stage.plan, store.buckets)
        notices += [] if encoders is None else more_than_planned(stage.plan, encoders)
    return TrainData(store, encoders, order), notices
