"""What an emulated training took, and what its steps had the card do, from the report of `bigdit emulate`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bigdit.profile.attempt import Launched, launched
from bigdit.units import GIB

WARM = 2
"""Steps that are left out of the counts: state and workspaces are made in them."""


def memory(report: dict[str, Any]) -> dict[str, float]:
    """The highest peaks in GiB: in steps, and before the first one."""
    (account,) = report["runs"][0]["accounts"]
    (card,) = account["cards"]
    return {
        "allocated_gib": _peak(card, "peak_allocated_bytes", training=True),
        "reserved_gib": _peak(card, "peak_reserved_bytes", training=True),
        "before_gib": _peak(card, "peak_allocated_bytes", training=False),
    }


def passes_gib(report: dict[str, Any]) -> float:
    """What forward and backward passes have allocated at most: it grows by the same with each sample."""
    (account,) = report["runs"][0]["accounts"]
    (card,) = account["cards"]
    peaks = (phase["peak_allocated_bytes"] for phase in card["phases"] if phase["phase"] in ("forward", "backward"))
    return max(peaks) / GIB


def work(report: dict[str, Any], steps: int) -> dict[str, Any]:
    """The mean of what a step hands to the card, of the `steps` that were taken.

    An optimizer that steps its weights a chunk at a time is seen to step as often as it has chunks.
    """
    (account,) = report["runs"][0]["accounts"]
    chunks, rest = divmod(len(account["work_by_step"]), steps)
    assert not rest, f"{len(account['work_by_step'])} steps of optimizers are no {steps} of a training"
    counted = account["work_by_step"][WARM * chunks :]
    total = sum((launched({}, each) for each in counted), start=launched({}, {}))
    return _a_step(total, steps - WARM)


def _peak(card: dict[str, Any], name: str, *, training: bool) -> float:
    peaks = [phase[name] for phase in card["phases"] if (phase["phase"] != "start") == training]
    return round(max(peaks, default=0) / GIB, 3)


def _a_step(total: Launched, steps: int) -> dict[str, Any]:
    each = defaultdict(float, {name: round(count / steps, 1) for name, count in total.counts.items()})
    copies = {name[7:].replace("_", " "): each[name] for name in sorted(each) if name.startswith("copies_")}
    return {
        "kernels": each["launches"],
        "library_calls": each["library_calls"],
        "fills": each["fills"],
        "copies": copies,
        "waits": each["host_syncs"],
    }
