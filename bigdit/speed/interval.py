"""Numbers that are not known better than within two bounds."""

from __future__ import annotations

import math

from pydantic import NonNegativeFloat, model_validator

from bigdit.spec import Strict


class Interval(Strict):
    """Between `low` and `high`, both possible; its unit is its holder's."""

    low: NonNegativeFloat
    high: NonNegativeFloat

    @model_validator(mode="after")
    def _low_is_low(self) -> Interval:
        if self.low > self.high:
            raise ValueError(f"{self.low} to {self.high} is no interval")
        return self

    def __add__(self, other: Interval) -> Interval:
        return Interval(low=self.low + other.low, high=self.high + other.high)

    def __mul__(self, times: float) -> Interval:
        return Interval(low=self.low * times, high=self.high * times)

    @property
    def middle(self) -> float:
        """The geometric mean of the bounds; 0 where one of them is."""
        return math.sqrt(self.low * self.high)

    def per(self, amount: float) -> Interval:
        """`amount` divided by this interval: seconds become a rate, a rate seconds. Raises ZeroDivisionError at 0."""
        return Interval(low=amount / self.high, high=amount / self.low)
