"""Frames of videos (by PyAV) and of animated images, at the frame rate of a clip; several clips of a video."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS
from bigdit.errors import UserError
from bigdit.files import IS_LFS_POINTER, is_lfs_pointer
from bigdit.sources.disk import opened_file
from bigdit.sources.image import check_pixels, decode, flat, opened
from bigdit.sources.protocol import Caption, Contents, DerivedItem, Item, Several, Source, Unusable

T = TypeVar("T")

Timed = tuple[Fraction, Fraction, T]
"""When a frame is first shown and how long it is shown if no frame follows, in seconds, and the frame itself."""

INSTANT = Fraction(0)


@dataclass(frozen=True)
class Clip:
    """A part of a video: at most `frames` frames at `fps` frames a second, after the first `start` frames."""

    fps: float
    frames: int
    start: int = 0

    @property
    def step(self) -> Fraction:
        """Seconds from one frame to the next. Broadcast rates, such as 23.976, are n × 1000/1001."""
        broadcast = Fraction(round(self.fps) * 1000, 1001)
        near = abs(self.fps - broadcast) < 5e-4
        return 1 / (broadcast if near else Fraction(self.fps).limit_denominator(1000))


def resampled(
    timed: Iterable[Timed[T]], clip: Clip, tick: Fraction = INSTANT, began: Fraction | None = None
) -> Iterator[T]:
    """The frame that is shown at each step of the clip, until the video ends. Reads at most one frame after the clip.

    `tick`: the unit of the times. A frame may be shown half a tick early. `began`: the time of the first frame, if
    `timed` begins with a later one.
    """
    number, end = clip.start, clip.start + clip.frames
    shown: Timed[T] | None = None
    for frame in timed:
        began = frame[0] if began is None else began
        while shown is not None and number < end and began + number * clip.step < frame[0] - tick / 2:
            yield shown[2]
            number += 1
        if number == end:
            return
        shown = frame
    if shown is None or began is None:
        return
    while number < end and began + number * clip.step < shown[0] + shown[1] - tick / 2:
        yield shown[2]
        number += 1


_FORMATS = ("GIF", "WEBP", "PNG", "AVIF")  # the pages of a TIFF are no frames
_UNTIMED_MS = 100
"""Milliseconds of a frame whose duration is 0. Source: https://bugzilla.mozilla.org/show_bug.cgi?id=139677"""


def moving_or_still(data: bytes, clip: Clip | None, max_pixels: int) -> Image.Image | Iterator[Image.Image]:
    """The clip's frames of an animated file. For other files, and without a clip, the image. Raises as `decode`."""
    if clip is None:
        return decode(data, max_pixels)
    with opened(data, max_pixels) as image:
        animated = image.format in _FORMATS and getattr(image, "is_animated", False)
    return resampled(_timed_pages(data, max_pixels), clip) if animated else decode(data, max_pixels)


def contents_of(
    data: bytes, clip: Clip | None, max_pixels: int, captions: tuple[Caption, ...], label: str | int | None
) -> Contents:
    """The contents of an image file. With a `clip`, the image may be animated."""
    shown = functools.partial(moving_or_still, data, clip, max_pixels)
    return Contents(shown, functools.partial(xxhash.xxh3_64_intdigest, data), captions, label)


def _timed_pages(data: bytes, max_pixels: int) -> Iterator[Timed[Image.Image]]:
    time = Fraction(0)
    with opened(data, max_pixels) as image:
        for number in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(number)
            check_pixels(image.width, image.height, max_pixels)  # a frame may be larger than the GIF itself
            image.load()
            shown = Fraction(image.info.get("duration") or _UNTIMED_MS).limit_denominator(1000) / 1000
            yield time, shown, flat(image)
            time += shown


SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
# FFmpeg's other demuxers are never tried: some open further files and addresses.
_OPTIONS = {"format_whitelist": "mov,matroska,avi", "protocol_whitelist": ""}
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_BEFORE_S = 1
"""Seconds before a clip that are decoded too, because an index has times of decoding, and frames are shown later.
Frames in their first half may be damaged, since they depend on earlier ones."""


def is_video(path: Path) -> bool:
    """Whether the suffix is that of a video."""
    return path.suffix.lower() in SUFFIXES


def moves(path: Path) -> bool:
    """Whether a file is a video or an animated image. Reads the header of an image."""
    if is_video(path):
        return True
    try:
        with opened_file(path) as file, Image.open(file, formats=_FORMATS) as image:
            return bool(getattr(image, "is_animated", False))
    except Exception:  # of any class: extraction says what is wrong with it
        return False


def video_frames(path: Path, clip: Clip, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """The clip's frames in RGB, upright, with square pixels, over white.

    Raises FileNotFoundError; Unusable, with the reason, for a file that is no video, damaged or too large; UserError if
    the file cannot be read, or PyAV is missing.
    """
    _pyav(path.name)
    with opened_file(path) as file:
        yield from decoded_frames(file, path.name, clip, max_pixels)


def decoded_frames(file: BinaryIO, name: str, clip: Clip, max_pixels: int) -> Iterator[Image.Image]:
    """The clip's frames from an open file, as `video_frames` has them. `name` is for errors."""
    av = _pyav(name)
    if is_lfs_pointer(file.read(100)):
        raise Unusable(f"video {IS_LFS_POINTER}")
    file.seek(0)
    try:
        with av.open(file, options=_OPTIONS) as container:
            yield from _frames(container, clip, max_pixels)
    except MemoryError:
        raise
    except av.FFmpegError as error:
        raise Unusable(f"damaged video: {error.strerror}") from None


def _frames(container: Any, clip: Clip, max_pixels: int) -> Iterator[Image.Image]:
    if not container.streams.video:
        raise Unusable("file without a video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise Unusable("damaged video: unknown codec")
    aspect = stream.sample_aspect_ratio or Fraction(1)
    check_pixels(*_shown_size(stream, aspect), max_pixels)
    stream.codec_context.thread_count = 1  # extraction's processes are the parallelism
    timed, began = _timed(_decoded(container, stream)), None
    if clip.start:
        timed, began = _near(container, stream, clip, timed)
    for frame in resampled(timed, clip, stream.time_base, began):
        size = _shown_size(frame, aspect)
        check_pixels(*size, max_pixels)  # the size may change within a stream
        yield _shown(frame, size)


def _decoded(container: Any, stream: Any) -> Iterator[Any]:
    """The next frames, with their transparency. Raises Unusable if the transparency cannot be decoded."""
    context = stream.codec_context
    # Matroska stores transparency apart, and marks it by an element or a tag. Most decoders ignore it.
    if "1" in (stream.metadata.get(name) for name in ("alpha_mode", "ALPHA_MODE")):
        context = _alpha_decoder(context.name)
    for packet in container.demux(stream):
        yield from context.decode(packet)


def _alpha_decoder(codec: str) -> Any:
    from av import CodecContext  # _pyav has checked that it is installed

    try:
        decoder = CodecContext.create(_ALPHA_DECODERS[codec], "r")
    except (KeyError, ValueError):  # another codec, or an FFmpeg without libvpx
        raise Unusable(
            f"video with transparency in {codec}, which PyAV cannot decode here; save it over white, or as ProRes 4444"
        ) from None
    decoder.thread_count = 1
    return decoder


def _near(
    container: Any, stream: Any, clip: Clip, timed: Iterator[Timed[Any]]
) -> tuple[Iterator[Timed[Any]], Fraction | None]:
    """Frames from shortly before the clip on, and the time of the video's first frame. None for a video without one."""
    first = next(timed, None)
    if first is None:
        return timed, None
    began = first[0]
    wanted = began + clip.start * clip.step
    if wanted - _BEFORE_S <= began:
        return chain([first], timed), began
    for target in (wanted - _BEFORE_S, began):  # if the index leads too far, everything is decoded
        container.seek(math.floor(target / stream.time_base), stream=stream)
        timed = _timed(_decoded(container, stream), wanted - Fraction(_BEFORE_S, 2))
        reached = next(timed, None)
        if reached is not None and reached[0] <= wanted:
            return chain([reached], timed), began
    raise Unusable(f"damaged video: no frame {float(wanted - began):.2f} s after its start")


def _timed(frames: Iterator[Any], sound_from: Fraction | None = None) -> Iterator[Timed[Any]]:
    """Frames with their times. A frame without a duration gets that of the one before it.

    Damaged frames before `sound_from` are left out.
    """
    last, gap = None, Fraction(0)
    for frame in frames:
        if frame.is_corrupt and frame.pts is not None and sound_from and frame.pts * frame.time_base < sound_from:
            continue
        if frame.pts is None or frame.is_corrupt:
            what = "has no time" if frame.pts is None else "is damaged"
            raise Unusable(f"damaged video: a frame after {float(last or 0):.2f} s {what}")
        time = frame.pts * frame.time_base
        gap = gap if last is None else time - last
        yield time, frame.duration * frame.time_base or gap, frame
        last = time


def _shown_size(coded: Any, aspect: Fraction) -> tuple[int, int]:
    """Width and height in square pixels, without losing any. `aspect`: width over height of a coded pixel."""
    return round(coded.width * max(aspect, 1)), round(coded.height / min(aspect, 1))


def _shown(frame: Any, size: tuple[int, int]) -> Image.Image:
    """A frame as players show it: in its size, over white, with the rotation that phones store."""
    if frame.format.has_palette or any(component.is_alpha for component in frame.format.components):
        image = flat(Image.fromarray(frame.to_ndarray(format="rgba")))
    else:
        image = frame.to_image()
    if image.size != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _pyav(name: str) -> Any:
    try:
        import av
    except ImportError:
        raise UserError(f"data.images: {name} is a video, and PyAV is missing; pip install 'bigdit[video]'") from None
    return av


class Clips(Several):
    """`count` clips of each item of a source, one after another.

    The length of a video is known only when it is decoded, so loading a clip beyond its end raises Unusable.
    """

    def __init__(self, source: Source, count: int, clip: Clip) -> None:
        super().__init__(source, count, f"in {count} clips")
        self._clip = clip

    def _item(self, index: int, item: Item) -> DerivedItem:
        number = index % self._count
        clip = dataclasses.replace(self._clip, start=number * self._clip.frames)
        moved = dataclasses.replace(cast(Any, item), clip=clip)  # items of all kinds have a clip
        name = f"{item.name} from {float(clip.start * clip.step):g} s"
        return DerivedItem(index, name, moved, functools.partial(_check_clip, number))


def _check_clip(number: int, contents: Contents) -> Contents:
    if not number:
        return contents

    def decode() -> Iterator[Image.Image]:
        found = contents.decode()
        if isinstance(found, Image.Image):
            raise Unusable("an image has one clip only")
        return _at_least_one(found)

    return dataclasses.replace(contents, decode=decode)


def _at_least_one(frames: Iterator[Image.Image]) -> Iterator[Image.Image]:
    first = next(frames, None)
    if first is None:
        raise Unusable("the video ends before this clip")
    yield first
    yield from frames
