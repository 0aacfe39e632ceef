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
    """The beginning of a video: at most `frames` frames, `fps` of them a second."""

    fps: float
    frames: int

    @property
    def step(self) -> Fraction:
        """Seconds from one frame to the next; rates of broadcasts, such as 23.976, are n × 1000/1001."""
        broadcast = Fraction(round(self.fps) * 1000, 1001)
        near = abs(self.fps - broadcast) < 1e-3
        return 1 / (broadcast if near else Fraction(self.fps).limit_denominator(1000))


def resampled(timed: Iterable[Timed[T]], clip: Clip, tick: Fraction = INSTANT) -> Iterator[T]:
    """The frame that is shown at each step of the clip, counted from the first one, as long as there is one.

    `tick`: what times are rounded to, so that a frame may be shown half of it earlier than it says. One frame beyond
    the last that is taken is asked for, and no more.
    """
    taken, began = 0, INSTANT
    shown: Timed[T] | None = None
    for frame in timed:
        if shown is None:
            began = frame[0]
        else:
            while taken < clip.frames and began + taken * clip.step < frame[0] - tick / 2:
                yield shown[2]
                taken += 1
        if taken == clip.frames:
            return
        shown = frame
    while shown is not None and taken < clip.frames and began + taken * clip.step < shown[0] + shown[1] - tick / 2:
        yield shown[2]
        taken += 1
