"""Video files by PyAV: decoded frame by frame, from shortly before the clip to its end, by one thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from bigdit.config.data import MAX_PIXELS
from bigdit.errors import UserError
from bigdit.files import IS_LFS_POINTER, is_lfs_pointer
from bigdit.sources.disk import opened_file
from bigdit.sources.picture import check_pixels, flat
from bigdit.sources.protocol import Unusable
from bigdit.sources.videos.resample import Clip, Timed, resampled

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
