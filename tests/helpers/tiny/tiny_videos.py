"""Videos of a few small frames."""

from fractions import Fraction

import av
import numpy as np
from PIL import Image

SHADES = 16  # steps of gray between frames: more than a codec changes


def video(path, times, tick=Fraction(1, 1000), codec="mpeg4", size=(32, 16), caption="a caption", aspect=None):
    """A video whose n-th frame is n shades bright and shown at `times[n]` ticks. `aspect` is its pixels' width over
    their height."""
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=Fraction(1) / tick)
        stream.width, stream.height = size
        stream.codec_context.time_base = tick
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_image(Image.new("RGB", size, (number * SHADES,) * 3))
            frame.pts, frame.time_base = time, tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if caption:
        path.with_suffix(".txt").write_text(caption)


def transparent(path, codec, pixels, tags=()):
    """One second of video: opaque red on the left, hidden green on the right. `pixels` is its pixel format."""
    frame = np.zeros((16, 32, 4), np.uint8)
    frame[:, :16], frame[:, 16:] = (255, 0, 0, 255), (0, 255, 0, 0)
    with av.open(path, "w") as container:
        options = {"auto-alt-ref": "0"} if codec == "libvpx" else {}
        stream = container.add_stream(codec, rate=8, options=options)
        stream.width, stream.height, stream.pix_fmt = 32, 16, pixels
        stream.metadata.update(tags)
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgba")))
        container.mux(stream.encode())
    path.with_suffix(".txt").write_text("a caption")


def moving_square(path, rightwards, frames=12, fps=16, side=32, height=None):
    """A white square that crosses a black video of `side` × (`height` or `side`) pixels, and a caption that describes
    it."""
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height = side, height or side
        for number in range(frames):
            image = Image.new("RGB", (stream.width, stream.height))
            place = 2 * number if rightwards else side - 8 - 2 * number
            image.paste("white", (place, 8, place + 8, 16))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    path.with_suffix(".txt").write_text(f"a square that moves to the {'right' if rightwards else 'left'}")
