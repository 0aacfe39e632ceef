"""Times of a step as intervals: the GPUs of a run, parts of a step, kernel launches, and calibration by measured
steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from bigdit.documents import Count, Positive
from bigdit.profile.attempt import Launched
from bigdit.strategy import Strict


class Cluster(Strict):
    """The `gpus` of a run, `gpus_per_node` in each machine.

    `network_gbs`: 10⁹ bytes per second that one machine sends while it receives as much.
    """

    gpus: Count = 1
    gpus_per_node: Count = 8
    network_gbs: Positive = 12.5

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def processes_per_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class Interval:
    """A range from `low` to `high`, both possible. A search makes tens of thousands of them."""

    low: NonNegativeFloat
    high: NonNegativeFloat

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"{self.low} to {self.high} is no interval")

    def __add__(self, other: Interval) -> Interval:
        return Interval(low=self.low + other.low, high=self.high + other.high)

    def __mul__(self, times: float) -> Interval:
        return Interval(low=self.low * times, high=self.high * times)

    @property
    def middle(self) -> float:
        """The geometric mean of the bounds; 0 if one is 0."""
        return math.sqrt(self.low * self.high)

    def per(self, amount: float) -> Interval:
        """`amount` divided by this interval: seconds become a rate, a rate seconds. Raises ZeroDivisionError at 0."""
        return Interval(low=amount / self.high, high=amount / self.low)


NO_TIME = Interval(low=0, high=0)


class StepTime(Strict):
    """Seconds of one optimizer step on every GPU of the cluster.

    `parts` (PARTS in step.py) add up to `seconds`, low to low and high to high. Launches, collectives and copies can
    overlap with kernels: the low bound has only what lasts beyond them, the high bound all of it. `launches`: all
    launches, also overlapped ones, without calibration.
    """

    seconds: Interval
    parts: dict[str, Interval]
    launches: Handed | None = None


LAUNCHED_SECONDS = Interval(low=5e-6, high=45e-6)
"""CPU time for each launch that an emulated GPU counts: Python, dispatcher, autograd, launch.

Low: as LAUNCH_SECONDS in step.py. High: an upper bound of the CPU time, the time per launch of steps on an H100 with a
virtual machine's Xeon. Kernels filled 23 to 68 % of these steps: 26 µs (dit-b-4), 27 (Sana with ZeRO-2), 44
(pixart-alpha 256). Source: on_gpu/measured.json in benchmarks.
"""


@dataclass(frozen=True)
class Launches:
    """Launches of each micro-batch, and of the end of the step."""

    micro: float
    step: float


def launches_of(launched: Mapping[str, Launched], micro_batches: int) -> Launches | None:
    """Launches from the counts of an emulated step, by phase; None if none were counted."""
    if not launched:
        return None
    step = sum(each.launches for phase, each in launched.items() if phase in ("step", "ema"))
    whole = sum(each.launches for each in launched.values())
    return Launches(micro=(whole - step) / micro_batches, step=step)


class Handed(Strict):
    """`count` launches of a step need `seconds` of CPU time. `counted`: on an emulated GPU; else one for each operator.
    `bound`: whether most of the step waits for them, at both ends of its interval, one, or none."""

    count: NonNegativeFloat
    counted: bool
    seconds: Interval
    bound: Literal["yes", "possible", "no"]


def bound(waits: Interval, seconds: Interval) -> Literal["yes", "possible", "no"]:
    """Whether a step of `seconds` is bound by launches, for which the GPU `waits`."""
    ends = [waits.low > seconds.low / 2, waits.high > seconds.high / 2]
    return "yes" if all(ends) else "possible" if any(ends) else "no"


class StepRatio(Strict):
    """`count` measured steps of one GPU took `ratio` (their median) times the middle of the prediction.

    `spread`: the largest distance from the median, as a logarithm. `source`: the same as text.
    """

    ratio: PositiveFloat
    spread: NonNegativeFloat
    count: PositiveInt
    source: str

    def applied(self, parts: Mapping[str, Interval]) -> dict[str, Interval]:
        """The parts of a step, all moved and narrowed in the same way, so that they still add up.

        The total's half-width w is the logarithm of high to middle. It becomes the measured spread plus w/(count + 1),
        like a prior with `count` observations, but at most w.
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
