"""What measured steps say about predicted ones: a ratio that moves the intervals, and evidence that narrows them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from bigdit.speed.seconds import Interval
from bigdit.strategy import Strict


class Calibration(Strict):
    """`count` measured steps of one card took `ratio` times (their median) the middle of the prediction.

    `spread`: how far the farthest of them was from the median, as a logarithm. `source` says all that in words.
    """

    ratio: PositiveFloat
    spread: NonNegativeFloat
    count: PositiveInt
    source: str

    def applied(self, parts: Mapping[str, Interval]) -> dict[str, Interval]:
        """The parts of a step, moved and narrowed alike, so that they still add up.

        Intervals are of ratios: of half-width w (the logarithm of high to middle), the total keeps the spread of
        what was measured and 1/(count + 1) of w, as a prior counts beside `count` observations, and never more
        than w.
        """
        total = sum(parts.values(), Interval(low=0, high=0))
        if total.middle == 0:
            return {name: part * self.ratio for name, part in parts.items()}
        half = math.log(total.high / total.middle)
        kept = math.exp(min(half, self.spread + half / (self.count + 1)))
        width = total.high - total.low
        # Where in the old interval the new bounds are: 0 is low, 1 high.
        low, high = (
            (bound - total.low) / width if width else 0.0 for bound in (total.middle / kept, total.middle * kept)
        )
        return {name: _within(part, max(low, 0.0), min(high, 1.0)) * self.ratio for name, part in parts.items()}


def _within(part: Interval, low: float, high: float) -> Interval:
    width = part.high - part.low
    return Interval(low=part.low + low * width, high=part.low + max(high, low) * width)
