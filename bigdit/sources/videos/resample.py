"""Which frames of a video are taken: by their times, so that any rate, also one that varies, becomes the one asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

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
