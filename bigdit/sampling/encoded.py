"""What encoders make of all captions and first frames, on the host and one after another, before anything is drawn."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image

from bigdit.config import RunConfig
from bigdit.config.data import MAX_PIXELS
from bigdit.encoders.first_frame import FirstFrames, load_first_frames
from bigdit.encoders.latents import bucket_pixels
from bigdit.encoders.protocol import ImageCodec
from bigdit.errors import UserError
from bigdit.loader.buffers import extras_of
from bigdit.sampling.conditions import Given, Labels, SamplingOptions, Texts, Words, conditions_of
from bigdit.sources.disk import IMAGE_BYTES, read_file
from bigdit.sources.image import decode
from bigdit.sources.protocol import Unusable
from bigdit.sources.videos import Clip, is_video, video_frames
from bigdit.store.schema import Known
from bigdit.strategy import ModelSpec


def give_back(device: torch.device) -> None:
    """Have the device get back what nothing holds any more: of pipelines parts hold each other, and torch's allocator
    keeps what was freed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_ONE = Clip(1, 1)


def asked_image(option: str, path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """As first_image. Raises UserError, which names the option or key that asked for it, where there is none."""
    try:
        return first_image(path, max_pixels)
    except (OSError, Unusable) as error:
        raise UserError(f"{option} {path} cannot be read: {error}") from None


def first_image(path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture of a file, or the first frame of a video, upright, of mode RGB or L. Raises FileNotFoundError;
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
    """The extras [images, …] fp32, on the host, of videos of `bucket` [(frames,) height, width] that begin with these
    images; a picture is cropped to the bucket as extraction does it."""
    found = [_extras(frames, each, bucket) for each in images]  # one by one: a whole video is made of each
    return {name: torch.cat([each[name] for each in found]).float() for name in found[0]}


def _extras(frames: FirstFrames, image: Image.Image, bucket: tuple[int, ...]) -> dict[str, torch.Tensor]:
    _, pixels = bucket_pixels(image, [bucket[-2:]], frames.color)
    video = torch.zeros(1, len(pixels), bucket[0] if len(bucket) == 3 else 1, *bucket[-2:], dtype=torch.uint8)
    video[0, :, 0] = torch.from_numpy(pixels)
    return extras_of(frames.encode(video), frames.mask)


_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Encoded:
    """Of so many pictures; `begun`: the extras of their first frames, a row each."""

    count: int
    guided: bool
    texts: Texts | Labels
    begun: Mapping[str, torch.Tensor]

    def of(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Given:
        """What these pictures are conditioned on; with guidance, followed by what they are led away from, which begins
        alike."""
        asked = [*numbers, *([self.count] * len(numbers) if self.guided else [])]
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
    words: Words,
) -> Encoded:
    """Of captions and `images`, one for all or one for each, by the run's encoders, which have `device` in turn and are
    gone from it then, and by `codec`, which is on the host. Raises UserError where one cannot be loaded, and in `words`
    for a class that is unknown."""
    texts = conditions_of(run, spec, known, captions, options, device, words)
    give_back(device)
    begun = _begun(run, images, options, codec, device)
    give_back(device)
    of_each = {name: each.expand(len(captions), *each.shape[1:]) for name, each in begun.items()}
    return Encoded(len(captions), options.guided, texts, of_each)


def _begun(
    run: RunConfig,
    images: Sequence[Image.Image],
    options: SamplingOptions,
    codec: ImageCodec,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    frames = load_first_frames(run.encoders.first_frame, codec, device)
    if frames is None:
        return {}
    codec.move(device)
    begun = first_frame_extras(frames, images, options.bucket)
    codec.move(_HOST)
    return begun
