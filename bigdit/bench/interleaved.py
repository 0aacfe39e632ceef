"""Contenders that do the same work by turns in one process, and what their times say: medians, quartiles, ratios.

Turns are taken round by round, since a machine's speed drifts: what is compared was measured side by side.
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Callable, Mapping, Sequence

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from bigdit.errors import versions
from bigdit.strategy import Strict

BUSY = 0.25
"""Of the cores: a machine whose load is above has other work, which its times show."""


class Load(Strict):
    """Processes of this machine that ran or waited for a core in the last minute, on the mean (getloadavg(3)), and the
    cores that this process may use."""

    mean: NonNegativeFloat
    cores: PositiveInt

    @classmethod
    def now(cls) -> Load:
        """As it is, before a benchmark adds its own."""
        return cls(mean=round(os.getloadavg()[0], 2), cores=len(os.sched_getaffinity(0)))

    @property
    def busy(self) -> bool:
        return self.mean > BUSY * self.cores


class Spread(Strict):
    """The median of some values, and the quartiles about it, which lie on values where there are three or five."""

    low: PositiveFloat
    median: PositiveFloat
    high: PositiveFloat

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        several = values if len(values) > 1 else [*values, *values]
        low, median, high = statistics.quantiles(several, n=4, method="inclusive")
        return cls(low=low, median=median, high=high)


class Contender(Strict):
    """`rounds`: seconds of a unit of work, as they were seen; `seconds` sums them up. `of_baseline`: seconds by the
    baseline's of the same round; None of the baseline itself."""

    name: str
    rounds: tuple[PositiveFloat, ...]
    seconds: Spread
    of_baseline: Spread | None


class Comparison(Strict):
    """What was compared; the first contender is the baseline. `notes`: what else must be known."""

    what: str
    written: datetime.date = Field(default_factory=datetime.date.today)
    load: Load
    contenders: tuple[Contender, ...]
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=versions)


def take_turns(turns: Mapping[str, Callable[[], float]], rounds: int) -> list[Contender]:
    """`rounds` turns of each, which return the seconds of a unit of work, such as a step. The first is the baseline.

    Every other round goes the other way about, so that none always comes after the same one. What is made once, or
    grows warm, the caller has behind it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            seconds[name].append(turns[name]())
    first, *_ = seconds.values()
    contenders = []
    for name, found in seconds.items():
        ratios = [own / other for own, other in zip(found, first, strict=True)]
        of_baseline = None if found is first else Spread.of(ratios)
        contenders.append(Contender(name=name, rounds=tuple(found), seconds=Spread.of(found), of_baseline=of_baseline))
    return contenders
