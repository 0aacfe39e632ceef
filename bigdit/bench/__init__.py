"""Benchmarks: interleaved contenders in one process, with medians, quartiles and ratios of their times.

Contenders take turns in rounds, because a machine's speed drifts. `memory.py`: memory against micro-batch. `step.py`: a
run's step against a plain loop. Other benchmarks are scripts in the folder `benchmarks`.
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
"""Share of the cores: a machine with a higher load is busy, and its times are too long."""


class MachineLoad(Strict):
    """The mean number of processes that ran or waited for a core in the last minute (getloadavg(3)), and the cores
    of this process."""

    mean: NonNegativeFloat
    cores: PositiveInt

    @classmethod
    def now(cls) -> MachineLoad:
        """The load now, before a benchmark adds its own."""
        return cls(mean=round(os.getloadavg()[0], 2), cores=len(os.sched_getaffinity(0)))

    @property
    def busy(self) -> bool:
        return self.mean > BUSY * self.cores


class Spread(Strict):
    """The median and the quartiles of some values."""

    low: PositiveFloat
    median: PositiveFloat
    high: PositiveFloat

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        several = values if len(values) > 1 else [*values, *values]
        low, median, high = statistics.quantiles(several, n=4, method="inclusive")
        return cls(low=low, median=median, high=high)


class Contender(Strict):
    """`rounds`: seconds of a unit of work; `seconds`: their spread. `of_baseline`: ratios to the baseline of the same
    round; None for the baseline."""

    name: str
    rounds: tuple[PositiveFloat, ...]
    seconds: Spread
    of_baseline: Spread | None


class Comparison(Strict):
    """A comparison; the first contender is the baseline."""

    what: str
    written: datetime.date = Field(default_factory=datetime.date.today)
    load: MachineLoad
    contenders: tuple[Contender, ...]
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=versions)


def take_turns(turns: Mapping[str, Callable[[], float]], rounds: int) -> list[Contender]:
    """Run `rounds` turns of each contender; a turn returns the seconds of a unit of work. The first is the baseline.

    Every other round is reversed, so none always follows the same one. The caller does the warm-up.
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
