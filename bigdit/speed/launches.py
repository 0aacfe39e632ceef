"""What the host hands to the card, one thing after another: a step of small kernels lasts as long as that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeFloat

from bigdit.profile.launched import Launched
from bigdit.spec import Strict
from bigdit.speed.interval import Interval

LAUNCHED_SECONDS = Interval(low=5e-6, high=45e-6)
"""Of the host, for each launch that an emulated card counts: Python, dispatcher, autograd, launch.

Low as of LAUNCH_SECONDS in roofline.py. High: what steps took for each launch on an H100 and a virtual machine's Xeon
where kernels filled 23 to 68 % of them: 26 µs (dit-b-4), 27 (Sana with ZeRO-2), 44 (pixart-alpha 256); the host cannot
have taken longer. Source: on_gpu/measured.json in benchmarks.
"""

_AT_THE_END = ("step", "ema")


@dataclass(frozen=True)
class Launches:
    """How many things each micro-batch has the host hand over, and the end of the step."""

    micro: float
    step: float


def launches_of(launched: Mapping[str, Launched], micro_batches: int) -> Launches | None:
    """From what a step of so many micro-batches had an emulated card do, by phase; None where none was counted."""
    if not launched:
        return None
    step = sum(each.launches for phase, each in launched.items() if phase in _AT_THE_END)
    whole = sum(each.launches for each in launched.values())
    return Launches(micro=(whole - step) / micro_batches, step=step)


class Handed(Strict):
    """`count` launches of a step take the host `seconds`. `counted`: on an emulated GPU; else one for each
    operator. `bound`: whether most of the step waits for them, at both ends of its interval, at one, or at none."""

    count: NonNegativeFloat
    counted: bool
    seconds: Interval
    bound: Literal["yes", "possible", "no"]


def bound(waits: Interval, seconds: Interval) -> Literal["yes", "possible", "no"]:
    """Whether a step of `seconds` is bound by launches, for which the card `waits`."""
    ends = [waits.low > seconds.low / 2, waits.high > seconds.high / 2]
    return "yes" if all(ends) else "possible" if any(ends) else "no"
