"""Losses that stand out from those before them."""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 100
LEAST = 20
"""Losses that are looked back on, and how many there must be of them."""

DEVIATIONS = 5.0
# Source: Hampel's identifier and the modified z-score (Iglewicz & Hoaglin, How to Detect and Handle Outliers, 1993):
# the median of distances from the median, times 1.4826, is the standard deviation of normal numbers. They call 3.5
# deviations an outlier; losses of random timesteps have a longer tail.
NORMAL = 1.4826


class LossSpikes:
    """Compares each loss with the median of the last 100, by their own robust deviation."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def add(self, loss: float) -> str | None:
        """What is to be said of this loss where it is more than 5 deviations above the median; takes it in."""
        found = self._compare(loss) if len(self._last) >= LEAST else None
        self._last.append(loss)
        return found

    def _compare(self, loss: float) -> str | None:
        median = statistics.median(self._last)
        deviation = NORMAL * statistics.median(abs(each - median) for each in self._last)
        if not loss - median > DEVIATIONS * deviation > 0:
            return None
        return (
            f"is {loss:.4f}, {(loss - median) / deviation:.1f} robust deviations above the median of the last "
            f"{len(self._last)}, {median:.4f}"
        )
