"""Videos: files, by PyAV, and animations; which of their frames are taken, and how many clips."""

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
from bigdit.sources.picture import check_pixels, decode, flat, opened
from bigdit.sources.protocol import Caption, Contents, Entry, Item, Readable, Source, Unusable

T = TypeVar("T")

Timed = tuple[Fraction, Fraction, T]
"""A frame: the second at which it begins to be shown, and for how long it is where no other follows."""

INSTANT = Fraction(0)


@dataclass(frozen=True)
class Clip:
    """A part of a video: at most `frames` frames, `fps` of them a second, after the first `start`."""

    fps: float
    frames: int
    start: int = 0

    @property
    def step(self) -> Fraction:
        """Seconds from one frame to the next; rates of broadcasts, such as 23.976, are n × 1000/1001."""
        broadcast = Fraction(round(self.fps) * 1000, 1001)
        near = abs(self.fps - broadcast) < 5e-4
        return 1 / (broadcast if near else Fraction(self.fps).limit_denominator(1000))


def resampled(
    timed: Iterable[Timed[T]], clip: Clip, tick: Fraction = INSTANT, began: Fraction | None = None
) -> Iterator[T]:
    """The frame that is shown at each step of the clip, counted from the first one, as long as there is one.

    `tick`: what times are rounded to, so that a frame may be shown half of it earlier than it says. `began`: when the
    first one was shown, where `timed` begins with a later one. One frame beyond the last that is taken is asked for,
    and no more.
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
"""Of a frame that says 0: browsers show it so long. Source: https://bugzilla.mozilla.org/show_bug.cgi?id=139677"""


def moving_or_still(data: bytes, clip: Clip | None, max_pixels: int) -> Image.Image | Iterator[Image.Image]:
    """The clip's frames of an animated file; the picture of another, or where no clip is taken. Raises Unusable, as
    `decode`."""
    if clip is None:
        return decode(data, max_pixels)
    with opened(data, max_pixels) as image:
        animated = image.format in _FORMATS and getattr(image, "is_animated", False)
    return resampled(_timed_pages(data, max_pixels), clip) if animated else decode(data, max_pixels)


def contents_of(
    data: bytes, clip: Clip | None, max_pixels: int, captions: tuple[Caption, ...], label: str | int | None
) -> Contents:
    """Those of a picture's bytes, which may be animated where a `clip` of videos is taken."""
    shown = functools.partial(moving_or_still, data, clip, max_pixels)
    return Contents(shown, functools.partial(xxhash.xxh3_64_intdigest, data), captions, label)


def _timed_pages(data: bytes, max_pixels: int) -> Iterator[Timed[Image.Image]]:
    time = Fraction(0)
    with opened(data, max_pixels) as image:
        for number in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(number)
            check_pixels(image.width, image.height, max_pixels)  # a GIF's frames may go beyond its own size
            image.load()
            shown = Fraction(image.info.get("duration") or _UNTIMED_MS).limit_denominator(1000) / 1000
            yield time, shown, flat(image)
            time += shown


SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
# FFmpeg's other demuxers, some of which open further files and addresses, are never tried.
_OPTIONS = {"format_whitelist": "mov,matroska,avi", "protocol_whitelist": ""}
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_BEFORE_S = 1
"""So much before a clip is sought: indices name the times at which frames are decoded, which are shown later. Of the
first half of it frames may be damaged, since they are made of others before them."""


def is_video(path: Path) -> bool:
    """Whether a file is one, by its suffix."""
    return path.suffix.lower() in SUFFIXES


def video_frames(path: Path, clip: Clip, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """The clip's frames in RGB, upright, of square pixels, over white. Raises FileNotFoundError; Unusable, with the
    reason, for a file that is no video, damaged or too large; UserError where it cannot be read, or PyAV is missing."""
    _pyav(path.name)
    with opened_file(path) as file:
        yield from decoded_frames(file, path.name, clip, max_pixels)


def decoded_frames(file: BinaryIO, name: str, clip: Clip, max_pixels: int) -> Iterator[Image.Image]:
    """The clip's frames of an open file, as `video_frames`; `name` is for errors."""
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
        raise Unusable("damaged video: its codec is not known")
    aspect = stream.sample_aspect_ratio or Fraction(1)
    check_pixels(*_shown_size(stream, aspect), max_pixels)
    stream.codec_context.thread_count = 1  # extraction's processes are the parallelism
    timed, began = _timed(_decoded(container, stream)), None
    if clip.start:
        timed, began = _near(container, stream, clip, timed)
    for frame in resampled(timed, clip, stream.time_base, began):
        size = _shown_size(frame, aspect)
        check_pixels(*size, max_pixels)  # which may change within a stream
        yield _shown(frame, size)


def _decoded(container: Any, stream: Any) -> Iterator[Any]:
    """Frames from where the container is, with their transparency. Raises Unusable where that cannot be decoded."""
    context = stream.codec_context
    # Matroska keeps it beside the frames, where most decoders ignore it, and says so by an element or a tag.
    if "1" in (stream.metadata.get(name) for name in ("alpha_mode", "ALPHA_MODE")):
        context = _alpha_decoder(context.name)
    for packet in container.demux(stream):
        yield from context.decode(packet)


def _alpha_decoder(codec: str) -> Any:
    from av import CodecContext  # _pyav has told where it is missing

    try:
        decoder = CodecContext.create(_ALPHA_DECODERS[codec], "r")
    except (KeyError, ValueError):  # another codec, or an FFmpeg that was built without libvpx
        raise Unusable(
            f"video with transparency in {codec}, which PyAV cannot decode here; save it over white, or as ProRes 4444"
        ) from None
    decoder.thread_count = 1
    return decoder


def _near(
    container: Any, stream: Any, clip: Clip, timed: Iterator[Timed[Any]]
) -> tuple[Iterator[Timed[Any]], Fraction | None]:
    """Frames from one on that is shown before the clip, and when the first of all in `timed` is; None without any."""
    first = next(timed, None)
    if first is None:
        return timed, None
    began = first[0]
    wanted = began + clip.start * clip.step
    if wanted - _BEFORE_S <= began:
        return chain([first], timed), began
    for target in (wanted - _BEFORE_S, began):  # where an index leads too far, all is decoded
        container.seek(math.floor(target / stream.time_base), stream=stream)
        timed = _timed(_decoded(container, stream), wanted - Fraction(_BEFORE_S, 2))
        reached = next(timed, None)
        if reached is not None and reached[0] <= wanted:
            return chain([reached], timed), began
    raise Unusable(f"damaged video: what is {float(wanted - began):.2f} s after its start is not found")


def _timed(frames: Iterator[Any], sound_from: Fraction | None = None) -> Iterator[Timed[Any]]:
    """Frames with their times; the last one is shown as long as it says, or else as the one before it. Those before
    `sound_from` may be damaged, and are left out then."""
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
    """Width and height of a stream or a frame in square pixels, none of which are lost; `aspect` is that of coded ones,
    width over height."""
    return round(coded.width * max(aspect, 1)), round(coded.height / min(aspect, 1))


def _shown(frame: Any, size: tuple[int, int]) -> Image.Image:
    """A frame as players show it: in its size, over white, by the rotation that phones write beside it."""
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
        raise UserError(
            f"data.images: {name} is a video, and PyAV is missing; pip install 'bigdit[video]' brings it"
        ) from None
    return av


@dataclass(frozen=True)
class ClipItem(Readable):
    """Clip `number` of an item, which has been told where it begins."""

    index: int
    name: str
    item: Item
    number: int

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        contents = self.item.read(max_pixels)
        return dataclasses.replace(contents, decode=lambda: self._clip(contents.decode())) if self.number else contents

    def _clip(self, found: Image.Image | Iterator[Image.Image]) -> Iterator[Image.Image]:
        if isinstance(found, Image.Image):
            raise Unusable("a picture, which has one clip")
        return _at_least_one(found)


class Clips:
    """So many clips of each item of a source, those of one beside each other. How many a video has is known when it is
    decoded: loading one that it has not raises Unusable."""

    def __init__(self, source: Source, count: int, clip: Clip) -> None:
        self._source, self._count, self._clip = source, count, clip
        self.class_names = source.class_names
        inner = source.identity
        digest = xxhash.xxh3_128_hexdigest(f"{inner['digest']} in {count} clips".encode())
        self.identity: dict[str, Any] = {**inner, "count": len(self), "digest": digest}

    def __len__(self) -> int:
        return len(self._source) * self._count

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return (dataclasses.replace(each, count=each.count * self._count) for each in self._source.entries())

    def items(self, start: int, end: int) -> list[ClipItem]:
        """Clips [start, end)."""
        first, end = start // self._count, min(end, len(self))
        inner = self._source.items(first, -(-end // self._count))
        return [self._item(index, inner[index // self._count - first]) for index in range(start, end)]

    def _item(self, index: int, item: Item) -> ClipItem:
        number = index % self._count
        clip = dataclasses.replace(self._clip, start=number * self._clip.frames)
        begun = dataclasses.replace(cast(Any, item), clip=clip)  # the items of all kinds have one
        return ClipItem(index, f"{item.name} from {float(clip.start * clip.step):g} s", begun, number)


def _at_least_one(frames: Iterator[Image.Image]) -> Iterator[Image.Image]:
    first = next(frames, None)
    if first is None:
        raise Unusable("the video ends before this clip")
    yield first
    yield from frames
