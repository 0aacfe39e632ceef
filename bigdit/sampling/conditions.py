"""The conditions of images, encoded one after another before anything is generated: captions, classes, first frames,
references and masked images.

Guidance leads away from a negative condition (Ho & Salimans, arXiv:2207.12598).
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

from bigdit.catalog.conditions import CLASS_LABEL, FILL, no_class
from bigdit.catalog.families import ALONE, REFERENCE, Editor, editor_of
from bigdit.catalog.resolve import index_of
from bigdit.config import RunConfig
from bigdit.config.data import MAX_PIXELS, TextEncoderConfig
from bigdit.encoders.latents import binary, bucket_pixels
from bigdit.encoders.load import FirstFrames, load_text_encoder
from bigdit.encoders.protocol import ImageCodec, Images, masked_out, shapes_of, to_unit_range
from bigdit.errors import UserError
from bigdit.loader.batch import condition
from bigdit.loader.buffers import extras_of, padded
from bigdit.objective_spec import SamplerName
from bigdit.sources.disk import IMAGE_BYTES, read_file
from bigdit.sources.image import MASK, decode, marked, owner
from bigdit.sources.protocol import Unusable
from bigdit.sources.videos import Clip, is_video, video_frames
from bigdit.store.schema import Classes, Known
from bigdit.strategy import ModelSpec


@dataclass(frozen=True)
class SamplingOptions:
    """`height` and `width` in pixels, and `frames` of a video; `guidance` 1 is none (Ho & Salimans, arXiv:2207.12598).

    `negative`: what guidance leads away from; None: the empty caption, or no class. `sampler`: None: the objective's
    default. `micro_batch_size`: images at once, where memory suffices.
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
        """As runs name it."""
        return (self.height, self.width) if self.frames is None else (self.frames, self.height, self.width)

    @property
    def size(self) -> str:
        """The option that asks for this size."""
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
        """The number of conditions."""
        tensors = (self.text_embeds, *self.extras.values())
        return next(len(each) for each in tensors if each is not None)

    def rows(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Given:
        """Those with these numbers, for a model that computes in `dtype`."""

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            return condition(tensor[list(numbers)], device, dtype)

        embeds, mask = (None if each is None else chosen(each) for each in (self.text_embeds, self.text_mask))
        return Given(embeds, mask, {name: chosen(each) for name, each in self.extras.items()})


def away(numbers: Sequence[int], count: int, conditions: int) -> list[int]:
    """What guidance leads away from for `numbers` of `count` images: the condition after the last image's, or one for
    each where there are twice as many `conditions` as images."""
    return [count + number if conditions == 2 * count else count for number in numbers]


class Texts:
    """Captions as the run's text encoder embeds them, in CPU memory; the encoder is freed."""

    def __init__(
        self,
        config: TextEncoderConfig,
        captions: Sequence[str],
        options: SamplingOptions,
        device: torch.device,
        seen: Images = (),
        adapted: Callable[[Any], None] | None = None,
    ) -> None:
        """`seen`: the images that each caption edits, where the encoder reads them. Then guidance leads away from a
        text of each with the same images. `adapted` adds a run's adapters to the encoder."""
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
        """Those of captions by their numbers. With guidance what it leads away from follows: see `away`."""
        return Given(*padded([self._texts[number] for number in numbers], self._most))


@dataclass(frozen=True)
class ConditionOptions:
    """The user's option for classes, and how to turn guidance off."""

    label: str = "--label"
    unguided: str = "pass --guidance 1"


class Labels:
    """Classes, by their names or numbers in a checkpoint."""

    def __init__(
        self, known: Known, spec: ModelSpec, labels: Sequence[str], options: SamplingOptions, words: ConditionOptions
    ) -> None:
        """Raises UserError with all unknown classes."""
        asked = [(words.label, label) for label in labels]
        if options.guided and options.negative is not None:
            asked.append(("--negative", options.negative))
        self._numbers = _numbers(Classes(known), asked)
        if options.guided and options.negative is None:
            away = no_class(spec)
            if away is None:
                raise UserError(f"guidance leads away from no class, which this model does not know; {words.unguided}")
            self._numbers.append(away)

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, numbers: Sequence[int]) -> Given:
        """As Texts.of."""
        return Given(None, None, {CLASS_LABEL: torch.tensor([self._numbers[number] for number in numbers])})


def _numbers(classes: Classes, asked: Sequence[tuple[str, str]]) -> list[int]:
    """The numbers of labels, each with its option. Raises UserError with all that are unknown."""
    found, problems = [], []
    for option, label in asked:
        try:
            found.append(classes.number(label))
        except UserError as error:
            problems.append(f"{option}: {error}")
    if problems:
        raise UserError(*problems)
    return found


def conditions_of(
    run: RunConfig,
    spec: ModelSpec,
    known: Known | None,
    captions: Sequence[str],
    options: SamplingOptions,
    device: torch.device,
    words: ConditionOptions = ConditionOptions(),
    seen: Images = (),
    adapted: Callable[[Any], None] | None = None,
) -> Texts | Labels:
    """Those of these captions, if the run has captions, or of classes that are `known` to it; encoded on `device`.
    `seen` and `adapted`: as in Texts.

    Raises UserError where an encoder cannot be loaded, and for an unknown class.
    """
    if run.encoders.text is not None:
        return Texts(run.encoders.text, captions, options, device, seen, adapted)
    assert known is not None  # of a run without captions
    return Labels(known, spec, captions, options, words)


def give_back(device: torch.device) -> None:
    """Return unused memory to the device: parts of pipelines hold each other, and torch's allocator keeps freed
    memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_ONE = Clip(1, 1)


def asked_image(option: str, path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """As first_image; with a mask beside it, such as x.mask.png, in mode RGBA, whose A is the mask. Raises UserError,
    with the option or key that asked for it, where it cannot be read, and for a mask of another size."""
    try:
        image = first_image(path, max_pixels)
        masks = [name for name, of in marked(os.listdir(path.parent), MASK).items() if of == owner(path.name)]
        if masks:
            mask = first_image(path.with_name(masks[-1]), max_pixels).convert("L")
            if mask.size != image.size:
                raise Unusable(
                    f"{masks[-1]} has {mask.width} × {mask.height} pixels, and it has {image.width} × {image.height}"
                )
            image = image.convert("RGB")
            image.putalpha(mask)
        return image
    except (OSError, Unusable) as error:
        raise UserError(f"{option} {path} cannot be read: {error}") from None


def first_image(path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image of a file, or the first frame of a video, upright, of mode RGB or L. Raises FileNotFoundError;
    Unusable, with the reason; UserError where it cannot be read."""
    if not is_video(path):
        return decode(read_file(path, IMAGE_BYTES), max_pixels)
    frame = next(video_frames(path, _ONE, max_pixels), None)
    if frame is None:
        raise Unusable("video without frames")
    return frame


def first_frame_extras(
    frames: FirstFrames, images: Sequence[Image.Image], bucket: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The extras [images, …] fp32, in CPU memory, of videos of `bucket` [(frames,) height, width] that begin with these
    images.

    An image is cropped to the bucket as extraction does it.
    """
    found = [_extras(frames, each, bucket) for each in images]  # one by one: each becomes a whole video
    return {name: torch.cat([each[name] for each in found]).float() for name in found[0]}


def _extras(frames: FirstFrames, image: Image.Image, bucket: tuple[int, ...]) -> dict[str, torch.Tensor]:
    _, pixels = bucket_pixels(image, [bucket[-2:]], frames.color)
    video = torch.zeros(1, len(pixels), bucket[0] if len(bucket) == 3 else 1, *bucket[-2:], dtype=torch.uint8)
    video[0, :, 0] = torch.from_numpy(pixels)
    return extras_of(frames.encode(video), frames.mask)


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class EncodedConditions:
    """The conditions of so many images; `begun`: the extras of their first frames or references, a row each."""

    count: int
    guided: bool
    texts: Texts | Labels
    begun: Mapping[str, torch.Tensor]

    def of(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Given:
        """The conditions of these images. With guidance, those that it leads away from follow, with the same first
        frames or references."""
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
    """Encode captions and `images`, for all or for each, with the run's encoders, which use `device` in turn.

    `codec` stays in CPU memory. Raises UserError where an encoder cannot be loaded, and in `words` for an unknown
    class.
    """
    editor = _editor(run)
    size = min(run.data.references, len(images))
    shown = [_edited(each, options.bucket, editor) for each in images] if size else []
    edited = [shown[at : at + size] for at in range(0, len(shown), size or 1)]
    seen = [edited[0 if len(edited) == 1 else at] for at in range(len(captions))] if editor.seen and edited else ()
    texts = conditions_of(run, spec, known, captions, options, device, words, seen, adapted)
    give_back(device)
    begun = _begun(run, images, edited, options, codec, device)
    give_back(device)
    of_each = {name: each.expand(len(captions), *each.shape[1:]) for name, each in begun.items()}
    return EncodedConditions(len(captions), options.guided, texts, of_each)


def _begun(
    run: RunConfig,
    images: Sequence[Image.Image],
    edited: Images,
    options: SamplingOptions,
    codec: ImageCodec,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    first = run.encoders.first_frame
    frames = None if first is None else FirstFrames(first, codec, device)
    if frames is None and not edited and not run.data.fill:
        return {}
    codec.move(device)
    if frames is not None:
        begun = first_frame_extras(frames, images, options.bucket)
    elif run.data.fill:
        begun = {FILL: torch.cat([_masked(each, options.bucket, codec) for each in images])}
    else:
        begun = {REFERENCE: torch.cat([torch.cat([_reference(each, codec) for each in some], 1) for some in edited])}
    codec.move(_CPU)
    return begun


def _editor(run: RunConfig) -> Editor:
    """How the pipeline that encodes the run's captions edits images."""
    text = run.encoders.text
    return ALONE if text is None or text.pipeline is None else editor_of(index_of(text.pipeline).get("_class_name"))


def _edited(image: Image.Image, bucket: tuple[int, ...], editor: Editor) -> Image.Image:
    """An image to edit in the size that extraction gives it for an edit of `bucket`."""
    _, pixels = bucket_pixels(image, [editor.resized(*bucket[-2:])], "rgb")
    return Image.fromarray(pixels.transpose(1, 2, 0))


def _reference(image: Image.Image, codec: ImageCodec) -> torch.Tensor:
    """The latents [1, 1, C, h, w] fp32 of an image to edit, in CPU memory, rounded as in a store."""
    _, pixels = bucket_pixels(image, [(image.height, image.width)], codec.color)
    return codec.encode_mode(to_unit_range(torch.from_numpy(pixels)[None])).to(_CPU, torch.bfloat16).float()[None]


def _masked(image: Image.Image, bucket: tuple[int, ...], codec: ImageCodec) -> torch.Tensor:
    """The latents and the mask [1, C', h, w] fp32 of an image to paint in, in CPU memory, rounded as in a store."""
    if "A" not in image.getbands():
        raise UserError(
            "--image: the model paints where a mask is white, and the image has no mask; put x.mask.png beside x.png"
        )
    _, pixels = bucket_pixels(image, [bucket], codec.color)
    mask = binary(bucket_pixels(image.getchannel("A"), [bucket], "gray")[1])
    return masked_out(codec, to_unit_range(torch.from_numpy(pixels)[None]), mask[None]).float()
