"""Conditions, encoded before images are generated: captions, classes, first frames, references and masked images.

With guidance (Ho & Salimans, arXiv:2207.12598) negative conditions follow them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from bigdit.catalog.families import ALONE, CLASS_LABEL, FILL, REFERENCE, Editor, editor_of, no_class
from bigdit.catalog.resolve import index_of
from bigdit.config.data import MAX_PIXELS, TextEncoderConfig
from bigdit.config.run import RunConfig
from bigdit.encoders.latents import binary, bucket_pixels
from bigdit.encoders.load import FirstFrames, load_text_encoder
from bigdit.encoders.protocol import ImageCodec, Images, masked_out, shapes_of, to_unit_range
from bigdit.errors import UserError
from bigdit.loader.batch import condition
from bigdit.loader.buffers import extras_of, padded
from bigdit.objective_spec import SamplerName
from bigdit.sources.disk import IMAGE_BYTES, read_file
from bigdit.sources.image import MASK, decode, decode_part, marked, owner
from bigdit.sources.protocol import Unusable
from bigdit.sources.videos import Clip, is_video, video_frames
from bigdit.store.schema import Classes, Known
from bigdit.strategy import ModelSpec


@dataclass(frozen=True)
class SamplingOptions:
    """`height` and `width` in pixels; `frames`: None for images; `guidance`: 1 for none.

    `negative`: the negative caption or class; None: the empty caption, or no class. `sampler`: None for the objective's
    default. `micro_batch_size`: the most images at once.
    """

    height: int
    width: int
    steps: int = 20
    guidance: float = 3.0
    negative: str | None = None
    sampler: SamplerName | None = None
    seed: int = 0
    micro_batch_size: int = 50
    frames: int | None = None

    @property
    def bucket(self) -> tuple[int, ...]:
        """The size as a bucket of data.buckets."""
        return (self.height, self.width) if self.frames is None else (self.frames, self.height, self.width)

    @property
    def size(self) -> str:
        """The option with this size, for messages."""
        return f"--size {'x'.join(map(str, self.bucket))}"

    @property
    def guided(self) -> bool:
        """Whether guidance is used."""
        return self.guidance != 1


@dataclass(frozen=True)
class Given:
    """The conditions of a batch."""

    text_embeds: torch.Tensor | None
    text_mask: torch.Tensor | None
    extras: Mapping[str, torch.Tensor]

    @property
    def count(self) -> int:
        """How many there are."""
        tensors = (self.text_embeds, *self.extras.values())
        return next(len(each) for each in tensors if each is not None)

    def rows(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Given:
        """The conditions with these numbers, for a model that computes in `dtype`."""

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            return condition(tensor[list(numbers)], device, dtype)

        embeds, mask = (None if each is None else chosen(each) for each in (self.text_embeds, self.text_mask))
        return Given(embeds, mask, {name: chosen(each) for name, each in self.extras.items()})


def away(numbers: Sequence[int], count: int, conditions: int) -> list[int]:
    """The negative conditions for `numbers` of `count` images: one for each if there are twice as many `conditions` as
    images, else the last one for all."""
    return [count + number if conditions == 2 * count else count for number in numbers]


class Texts:
    """Captions embedded by the run's text encoder, in CPU memory; the encoder is freed."""

    def __init__(
        self,
        config: TextEncoderConfig,
        captions: Sequence[str],
        options: SamplingOptions,
        device: torch.device,
        seen: Images = (),
        adapted: Callable[[Any], None] | None = None,
    ) -> None:
        """`seen`: the images that each caption edits, if the encoder reads images. Then each caption has its own
        negative text with the same images. `adapted` adds a run's adapters to the encoder."""
        encoder = load_text_encoder(config, device, references=len(seen[0]) if seen else 0)
        if adapted is not None:
            adapted(encoder)
        texts = list(encoder.encode(captions, images=seen))
        if options.guided and seen:
            texts += encoder.encode([options.negative or ""] * len(captions), images=seen)
        elif options.guided:
            texts.append(encoder.null() if options.negative is None else encoder.encode([options.negative])[0])
        self._texts = [text.to("cpu", torch.float32) for text in texts]
        self._most = {name: most for name, (most, _) in shapes_of(encoder).items()}

    def __len__(self) -> int:
        return len(self._texts)

    def of(self, numbers: Sequence[int]) -> Given:
        """The conditions with these numbers. With guidance, negative ones follow: see `away`."""
        return Given(*padded([self._texts[number] for number in numbers], self._most))


@dataclass(frozen=True)
class ConditionOptions:
    """The user's option for classes, and how to turn guidance off."""

    label: str = "--label"
    unguided: str = "pass --guidance 1"


class Labels:
    """Classes, by their names or numbers in a checkpoint."""

    def __init__(
        self,
        known: Known,
        spec: ModelSpec,
        labels: Sequence[tuple[str, str]],
        options: SamplingOptions,
        unguided: str = ConditionOptions.unguided,
    ) -> None:
        """`labels`: (option, class). Raises UserError with all unknown classes."""
        negative = [("--negative", options.negative)] if options.guided and options.negative is not None else []
        self._numbers = class_numbers(known, [*labels, *negative])
        if options.guided and not negative:
            away = no_class(spec)
            if away is None:
                raise UserError(f"guidance needs a class for no class, which this model lacks; {unguided}")
            self._numbers.append(away)

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, numbers: Sequence[int]) -> Given:
        """As `Texts.of`."""
        return Given(None, None, {CLASS_LABEL: torch.tensor([self._numbers[number] for number in numbers])})


def class_numbers(known: Known, labels: Sequence[tuple[str, str]]) -> list[int]:
    """The numbers of classes that are given as (option, class). Raises UserError with all unknown classes."""
    classes, found, problems = Classes(known), [], []
    for option, label in labels:
        try:
            found.append(classes.number(label))
        except UserError as error:
            problems.append(f"{option}: {error}")
    if problems:
        raise UserError(*problems)
    return found


def give_back(device: torch.device) -> None:
    """Free unused GPU memory: parts of pipelines refer to each other, and torch's allocator keeps freed memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def asked_image(option: str, path: Path, max_pixels: int = MAX_PIXELS, masked: bool = False) -> Image.Image:
    """As first_image; in mode RGBA, with the mask as A, if there is a mask file such as x.mask.png.

    Raises UserError, with the option or key, if it cannot be read, the mask has another size, or a `masked` image has
    none.
    """
    try:
        image = first_image(path, max_pixels)
        masks = [name for name, of in marked(os.listdir(path.parent), MASK).items() if of == owner(path.name)]
        if masks:
            mask = decode_part(masks[-1], read_file(path.with_name(masks[-1]), IMAGE_BYTES), max_pixels).convert("L")
            if mask.size != image.size:
                raise Unusable(
                    f"{masks[-1]} has {mask.width} × {mask.height} pixels, and the image has {image.width} × "
                    f"{image.height}; make them equal"
                )
            image = image.convert("RGB")
            image.putalpha(mask)
        elif masked:
            raise UserError(
                f"{option} {path} has no mask, and the model paints where it is white; put "
                f"{path.stem}{MASK}.png beside it"
            )
        return image
    except (OSError, Unusable) as error:
        raise UserError(f"{option} {path} cannot be read: {error}") from None


def first_image(path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image of a file, or the first frame of a video, upright, in mode RGB or L. Raises FileNotFoundError; Unusable
    with the reason; UserError if it cannot be read."""
    if not is_video(path):
        return decode(read_file(path, IMAGE_BYTES), max_pixels)
    frame = next(video_frames(path, Clip(1, 1), max_pixels), None)
    if frame is None:
        raise Unusable("video without frames")
    return frame


def _first_frame_extras(frames: FirstFrames, image: Image.Image, bucket: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The extras [1, …] fp32 of a video of `bucket` [(frames,) height, width] that begins with this image."""
    _, pixels = bucket_pixels(image, [bucket[-2:]], frames.color)
    video = torch.zeros(1, len(pixels), bucket[0] if len(bucket) == 3 else 1, *bucket[-2:], dtype=torch.uint8)
    video[0, :, 0] = torch.from_numpy(pixels)
    return {name: each.float() for name, each in extras_of(frames.encode(video), frames.mask).items()}


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class EncodedConditions:
    """The conditions of `count` images; `begun`: the extras of their first frames or references, a row each."""

    count: int
    guided: bool
    texts: Texts | Labels
    begun: Mapping[str, torch.Tensor]

    def of(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Given:
        """The conditions of these images. With guidance, negative ones follow, with the same first frames or
        references."""
        asked = [*numbers, *(away(numbers, self.count, len(self.texts)) if self.guided else [])]
        given = self.texts.of(asked)
        frames = [*numbers, *numbers] if self.guided else list(numbers)
        begun = {name: each[frames] for name, each in self.begun.items()}
        return replace(given, extras={**given.extras, **begun}).rows(range(len(asked)), device, dtype)


def encoded(
    run: RunConfig,
    spec: ModelSpec,
    known: Known | None,
    captions: Sequence[str],
    images: Sequence[Image.Image],
    options: SamplingOptions,
    codec: ImageCodec,
    device: torch.device,
    words: ConditionOptions,
    adapted: Callable[[Any], None] | None = None,
) -> EncodedConditions:
    """Encode captions, or classes that are `known`, and `images`, one set for all or one for each.

    The run's encoders use `device` in turn; `codec` stays in CPU memory. `adapted`: as in Texts. Raises UserError if an
    encoder cannot be loaded, and with the option in `words` for an unknown class.
    """
    editor = _editor(run)
    size = min(run.data.references, len(images))
    shown = [_edited(each, options.bucket, editor) for each in images] if size else []
    edited = [shown[at : at + size] for at in range(0, len(shown), size or 1)]
    seen = [edited[0 if len(edited) == 1 else at] for at in range(len(captions))] if editor.seen and edited else ()
    texts: Texts | Labels
    if run.encoders.text is not None:
        texts = Texts(run.encoders.text, captions, options, device, seen, adapted)
    else:
        assert known is not None  # of a run without captions
        texts = Labels(known, spec, [(words.label, each) for each in captions], options, words.unguided)
    give_back(device)
    begun = _image_extras(run, images, edited, options.bucket, codec, device)
    give_back(device)
    of_each = {name: each.expand(len(captions), *each.shape[1:]) for name, each in begun.items()}
    return EncodedConditions(len(captions), options.guided, texts, of_each)


def _image_extras(
    run: RunConfig,
    images: Sequence[Image.Image],
    edited: Images,
    bucket: tuple[int, ...],
    codec: ImageCodec,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The extras of first frames, masked images or references, a row each, in CPU memory."""
    first = run.encoders.first_frame
    frames = None if first is None else FirstFrames(first, codec, device)
    if frames is None and not edited and not run.data.fill:
        return {}
    codec.move(device)
    if frames is not None:
        found = [_first_frame_extras(frames, each, bucket) for each in images]  # one by one: each is a whole video
        begun = {name: torch.cat([each[name] for each in found]) for name in found[0]}
    elif run.data.fill:
        begun = {FILL: torch.cat([_masked(each, bucket, codec) for each in images])}
    else:
        begun = {REFERENCE: torch.cat([torch.cat([_reference(each, codec) for each in some], 1) for some in edited])}
    codec.move(_CPU)
    return begun


def _editor(run: RunConfig) -> Editor:
    """How the pipeline that encodes the run's captions edits images."""
    text = run.encoders.text
    return ALONE if text is None or text.pipeline is None else editor_of(index_of(text.pipeline).get("_class_name"))


def _edited(image: Image.Image, bucket: tuple[int, ...], editor: Editor) -> Image.Image:
    """A reference in the size that extraction gives it for `bucket`."""
    _, pixels = bucket_pixels(image, [editor.resized(*bucket[-2:])], "rgb")
    return Image.fromarray(pixels.transpose(1, 2, 0))


def _reference(image: Image.Image, codec: ImageCodec) -> torch.Tensor:
    """The latents [1, 1, C, h, w] fp32 of a reference, in CPU memory, rounded as in a store."""
    _, pixels = bucket_pixels(image, [(image.height, image.width)], codec.color)
    return codec.encode_mode(to_unit_range(torch.from_numpy(pixels)[None])).to(_CPU, torch.bfloat16).float()[None]


def _masked(image: Image.Image, bucket: tuple[int, ...], codec: ImageCodec) -> torch.Tensor:
    """The latents and mask [1, C', h, w] fp32 of an image to fill, in CPU memory, rounded as in a store."""
    if "A" not in image.getbands():
        raise UserError(
            "--image: the model paints where a mask is white, and the image has no mask; put x.mask.png beside x.png"
        )
    _, pixels = bucket_pixels(image, [bucket], codec.color)
    mask = binary(bucket_pixels(image.getchannel("A"), [bucket], "gray")[1])
    return masked_out(codec, to_unit_range(torch.from_numpy(pixels)[None]), mask[None]).float()
