"""The cost of a data set: its latent and embedding cache, the time of extraction, the memory of its encoders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from bigdit.catalog import CatalogModel, Gpu, batch_shape
from bigdit.catalog.encoders import online_encoders
from bigdit.catalog.families import FAMILIES, fill_channels, fills, stream_shapes, takes_first_frame
from bigdit.catalog.gpus import precision_problems
from bigdit.config.data import PART_SIZE, part_size
from bigdit.encoders.recipes import RECIPES
from bigdit.errors import UserError
from bigdit.memory.process import cuda_context
from bigdit.profile.attempt import IMAGES, TEXTS, Attempt, StepRequest, request_for, weights_of
from bigdit.search.plan import DatasetNeed, ResolvedRequest
from bigdit.speed.seconds import Cluster, Interval
from bigdit.speed.step import step_time
from bigdit.speed.work import NOTHING, Work, load_of
from bigdit.strategy import BatchShape, Precision, Strategy
from bigdit.units import gib, on_disk

STORED_BYTES = 2
"""Bytes of bf16, in which encoders/vae.py and extract/worker.py store hidden states and the latents of a VAE (the mode
of its distribution, without the deviation)."""

ROW_BYTES = 72
"""A row and one caption in the tables of a part: four int64 and five, as in store/part.py."""
STREAM_BYTES = 24
"""Each further text of a caption: three int64."""
FRAMED_BYTES = 8
"""Added to a row with a first frame: an int64."""
LABELLED_ROW_BYTES = 40
"""A row and its class, an int64, of images without captions."""

CAPTION_TOKENS = Interval(low=49, high=168)
"""Mean tokens of a caption. Low: LLaVA writes 49.4 tokens, two or three sentences, over 1.3 billion images
(Recap-DataComp-1B, arXiv:2406.08478). Alternative texts of the web are shorter: 19 tokens in LAION's high-resolution
set. High: detailed captions in T5's tokens. frutiemax/vintage-artworks-60k-captioned-pixart has 59 726 samples in
91 791 685 497 bytes, all in fp16. Without latents of 4 × 64 × 64 and 4 × 128 × 128, each has 167.6 × 4096 states.
"""

PARTS_HELD = 3
"""Parts in memory of an extraction worker: the one that it encodes, and those that wait in store/part.py."""

ENCODED_AT_ONCE = 16
"""Images in one pass of the encoders, as in extract/worker.py. Videos go one by one."""


Encoding = Mapping[int, Attempt]
"""Attempts of the encoders alone, by samples at once."""


def encoding_requests(request: ResolvedRequest, most: int | None = None) -> dict[int, StepRequest]:
    """Requests for extraction's encoders, with one sample and with `most` at once (default: as many as in extraction).

    Empty if the catalogue does not know the encoders.
    """
    model = request.model
    try:
        online_encoders(model, batch_shape(model, request.resolution, request.frames))
    except UserError:
        return {}
    precision: Precision = "fp16" if precision_problems(request.gpu, "bf16") else "bf16"
    found = {}
    for size in sorted({1, most or (1 if model.video else ENCODED_AT_ONCE)}):
        strategy = Strategy(features="online", encode_chunk=None, micro_batch_size=size, precision=precision)
        steps = request_for(model, request.gpu, strategy, resolution=request.resolution, frames=request.frames)
        found[size] = steps.model_copy(update={"part": "encoders"})
    return found


def dataset_need(request: ResolvedRequest, batch: BatchShape, encoding: Encoding) -> DatasetNeed | None:
    """The cost of the request's images, each a sample of `batch`; None without a number of images.

    `encoding` answers `encoding_requests`; empty if there are none.
    """
    if request.images is None:
        return None
    images = request.images
    latents = math.prod(batch.latents) * STORED_BYTES
    texts = _texts(request.model, batch)
    padded = sum(each.padded for each in texts)
    text = sum((each.stored for each in texts), Interval(low=0, high=0))
    kind = "video" if request.model.video else "image"
    sample = latents + (LABELLED_ROW_BYTES if batch.text is None else ROW_BYTES)
    first = _first_frame_bytes(request.model, batch) + _reference_bytes(request.model, batch) * batch.references
    sample += first + FRAMED_BYTES if first else 0
    sample += STREAM_BYTES * max(len(texts) - 1, 0)
    store = (text + Interval(low=sample, high=sample)) * images
    extraction = None
    if most := max(encoding, default=0):  # samples that the encoders take at once
        work = Work(micro=load_of(encoding[most].work, (IMAGES, TEXTS), "encode"), last=NOTHING, step=NOTHING)
        seconds = step_time(work, Strategy(micro_batch_size=most), request.gpu, Cluster()).seconds
        extraction = seconds * (images / request.cluster.gpus / most)
    return DatasetNeed(
        images=images,
        latent_bytes=latents,
        text_bytes=text,
        padded_text_bytes=padded,
        store_bytes=store,
        extraction_seconds=extraction,
        notes=(
            *(_text_notes(texts, padded, text, images, kind) if texts else ()),
            *([_first_frame_note(first, request.model, batch)] if first else ()),
            *_part_notes(sample + text.high),
            *_extraction_notes(request.model, batch, known=bool(encoding)),
            *(_room_notes(encoders_need(encoding), request) if encoding else ()),
        ),
    )


class _Text(NamedTuple):
    """A text of a caption, or a further one with a `name`: `most` tokens of `dim`; `tokens` are stored on average."""

    name: str
    most: int
    dim: int
    tokens: Interval

    @property
    def padded(self) -> int:
        """Bytes per sample, padded."""
        return self.most * self.dim * STORED_BYTES

    @property
    def stored(self) -> Interval:
        """Bytes per sample, as stored."""
        return self.tokens * (self.dim * STORED_BYTES)

    @property
    def kept(self) -> bool:
        """Whether its padding is stored."""
        return self.tokens.low == self.most

    def __str__(self) -> str:
        return f"{self.most} × {self.dim}" + (f" ({self.name})" if self.name else "")


def _texts(model: CatalogModel, batch: BatchShape) -> list[_Text]:
    """The texts of a caption, as the model's pipeline pads them."""
    if batch.text is None:
        return []
    recipe = RECIPES.get(model.text_pipeline or "")
    shapes = {"": batch.text, **stream_shapes(model.spec.class_name, model.spec.kwargs)}
    texts = []
    for name, (most, dim) in shapes.items():
        low, high = (min(bound, most) for bound in (CAPTION_TOKENS.low, CAPTION_TOKENS.high))
        if recipe is not None and recipe.keeps(name):
            low = high = most
        elif recipe is not None and name in recipe.rare:
            low = 0
        texts.append(_Text(name, most, dim, Interval(low=low, high=high)))
    return texts


def _first_frame_bytes(model: CatalogModel, batch: BatchShape) -> int:
    """Bytes of a sample's first frame (latents of a whole video, and embeddings if the model takes them); or of its
    masked image (latents and mask)."""
    if fills(model.spec):
        return fill_channels(batch.latents[0], model.vae.downsample) * math.prod(batch.latents[1:]) * STORED_BYTES
    if not batch.first_frame and not takes_first_frame(model.spec):
        return 0
    inputs = FAMILIES[model.spec.class_name]
    embeds = inputs.image_tokens * (model.spec.kwargs.get(inputs.image_dim or "") or 0)
    return (math.prod(batch.latents) + embeds) * STORED_BYTES


def _reference_bytes(model: CatalogModel, batch: BatchShape) -> int:
    """Bytes of an image that a sample edits: latents, and states in the text and in the dropped caption's text."""
    _, dim = batch.text or (0, 0)
    seen = 0 if model.text is None else model.text.reference_tokens
    return (math.prod(batch.reference or batch.latents) + 2 * seen * dim) * STORED_BYTES


def _first_frame_note(nbytes: int, model: CatalogModel, batch: BatchShape) -> str:
    if batch.references or not model.video:
        more = "image that each sample edits" if batch.references else "masked image of each sample"
        return f"the {more} takes {on_disk(nbytes)} more; the VAE's pass over it is not in the time of extraction"
    return (
        f"the first frame of each video takes {on_disk(nbytes)} more; the VAE's pass over it, for Wan 2.1's as long "
        "as that over the video, and the image encoder's are not in the time of extraction"
    )


def _text_notes(texts: Sequence[_Text], padded: int, stored: Interval, images: int, sample: str) -> list[str]:
    note = (
        f"padded to {' and '.join(map(str, texts))} in bf16, the text of each {sample} takes {on_disk(padded)}, and "
        f"that of all {on_disk(padded * images)}"
    )
    cut = [each for each in texts if not each.kept]
    if not cut:
        return [f"{note}; it is stored so, since the model reads padding as well"]
    but = "".join(f" but that of {each}" for each in texts if each.kept)
    low, high = (round(max(each)) for each in zip(*((text.tokens.low, text.tokens.high) for text in cut), strict=True))
    return [
        f"{note}; it is stored without padding{but}: {on_disk(stored.low)} to {on_disk(stored.high)} each, with "
        f"captions of {low} tokens (two or three sentences) to {high} (detailed ones) on the mean"
    ]


def _part_notes(sample_bytes: float) -> list[str]:
    size = part_size(sample_bytes)
    if size == PART_SIZE:
        return []
    held, less = (PARTS_HELD * each * sample_bytes for each in (PART_SIZE, size))
    return [
        f"a worker of `bigdit extract` holds up to {PARTS_HELD} parts in CPU memory: {on_disk(held)} with "
        f"data.part_size {PART_SIZE}, {on_disk(less)} with {size}"
    ]


def _extraction_notes(model: CatalogModel, batch: BatchShape, *, known: bool) -> list[str]:
    notes = [f"how long extraction takes is not known: the catalogue has not all encoders of {model.name}"]
    if known:
        filled = "" if batch.text is None else f", with captions that fill all {batch.text[0]} tokens"
        notes = [
            f"extraction is what the encoders compute on the GPUs{filled}; reading and decoding images is not in "
            "it, and `bigdit extract` without a GPU takes longer"
        ]
    if model.training_obstacle is not None:
        notes.append(f"such a store cannot be trained from yet: {model.training_obstacle}")
    return notes


def _room_notes(need: EncodersNeed, request: ResolvedRequest) -> list[str]:
    """A line where the encoders do not fit the GPU together."""
    way = need.way(request.gpu)
    if way == "together":
        return []
    if way == "in turns":
        return [
            f"text encoders and VAE do not fit the {request.gpu.title} together: a worker of `bigdit extract` "
            f"has them take turns, and {gib(need.waiting)} of weights wait in CPU memory"
        ]
    name, nbytes = need.larger
    return [
        f"extraction does not fit the {request.gpu.title}: with a sample at a time {gib(nbytes)} of "
        f"{gib(room(request.gpu))} are needed for the {name}; a larger GPU, or encoders.device: cpu, encodes"
    ]


Way = Literal["together", "in turns"]

KEPT_FREE = 0.1
"""Share of the GPU that is kept free for fragmentation."""


class EncoderBytes(NamedTuple):
    """Bytes of image or text encoders: of their weights, for one sample, and for each further one."""

    weights: float
    first: float
    further: float

    def taken(self, samples: int) -> float:
        """Bytes with so many samples at once."""
        return self.weights + self.first + self.further * (samples - 1)


class EncodersNeed(NamedTuple):
    """Bytes of image and text encoders. A sample has `frames`: 1, or those of a video."""

    images: EncoderBytes
    texts: EncoderBytes
    frames: int = 1

    def taken(self, way: Way, size: int) -> float:
        """Bytes with encoders.batch_size of so many frames, and captions, at once."""
        images, texts = self.images.taken(-(-size // self.frames)), self.texts.taken(size)
        if way == "in turns":
            return max(images, texts)
        return max(images + self.texts.weights, texts + self.images.weights)

    def way(self, gpu: Gpu, processes: int = 1) -> Way | None:
        """How each of `processes` on a GPU encodes one sample at a time; None if it does not fit."""
        if self.taken("in turns", 1) > room(gpu, processes):
            return None
        alone = not self.texts.weights
        return "together" if alone or self.taken("together", 1) <= room(gpu, processes, KEPT_FREE) else "in turns"

    @property
    def waiting(self) -> float:
        """Most bytes of weights that wait in CPU memory while encoders take turns."""
        return max(self.images.weights, self.texts.weights)

    @property
    def larger(self) -> tuple[str, float]:
        """The encoders that take more with one sample, and their bytes."""
        sides = {"text encoders": self.texts.taken(1), "VAE": self.images.taken(1)}
        return max(sides.items(), key=lambda side: side[1])


def room(gpu: Gpu, processes: int = 1, kept_free: float = 0.0) -> float:
    """Bytes that each of `processes` on a GPU has for tensors."""
    context = cuda_context(gpu)
    return gpu.usable_bytes * (1 - kept_free) / processes - context.high_bytes


def encoders_need(encoding: Encoding, text_bytes: int | None = None, frames: int = 1) -> EncodersNeed:
    """The bytes of encoders from attempts with one sample and with more. `text_bytes`: weights of the text encoders as
    loaded, used if larger, since a folder may also hold parts that encode no text."""
    few, many = min(encoding), max(encoding)

    def side(phase: str) -> EncoderBytes:
        peak, most = (encoding[samples].phases[phase].peak_bytes for samples in (few, many))
        weights = encoding[few].phases[weights_of(phase)].end_bytes
        return EncoderBytes(weights, peak - weights, (most - peak) / (many - few) if many > few else 0)

    texts = side(TEXTS)
    return EncodersNeed(side(IMAGES), texts._replace(weights=max(texts.weights, text_bytes or 0)), frames)
