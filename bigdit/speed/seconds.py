"""Seconds of a step as intervals, part by part. Values only; step.py finds them."""

from __future__ import annotations

from bigdit.spec import Strict
from bigdit.speed.interval import Interval
from bigdit.speed.launches import Handed

PARTS = (
    "matrix products",
    "attention",
    "convolutions",
    "memory-bound operators",
    "encoders",
    "optimizer",
    "launches",
    "host",
    "collectives",
    "copies to and from the host",
)
"""Where the seconds go. `launches` are those in which the card waits for the next kernel; `host` is what the host's
cores compute: optimizer and average that were moved there."""

NO_TIME = Interval(low=0, high=0)


class StepTime(Strict):
    """Seconds of one optimizer step on every card of the cluster.

    `parts` (of PARTS) add up to `seconds`, low to low and high to high. What can run at the same time as kernels
    (launches, collectives, copies) counts in the low bound only by what lasts beyond them, in the high bound whole.
    `launches`: all of them, whether the card waits or not, as no receipt has moved them.
    """

    seconds: Interval
    parts: dict[str, Interval]
    launches: Handed | None = None
