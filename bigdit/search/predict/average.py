"""A moving average beside a strategy that has none: what it adds to one optimizer's state, it adds to another's."""

from __future__ import annotations

from dataclasses import replace

from bigdit.search.predict.moments import Bytes
from bigdit.search.predict.outline import Line, Outline, level, numbered


def averaged(outline: Outline, base: Outline, other: Outline) -> Outline:
    """`outline` with the average that `other` has and `base` has not, and with its phase.

    All are of one engine: `outline` differs from `base` in optimizer, masters or checkpointing, `other` in the average
    alone, and one micro-batch size of it is enough. Two phases are near, and do not decide: the start, through all of
    which the average is taken to be there, and the average's own, which takes within what it does in `other`.
    """
    ours, theirs = numbered(outline.phases), numbered(base.phases)
    live, parts, before = [], [], ("init", 0)
    for at, key in enumerate(numbered(other.phases)):
        if key in ours:
            number = ours[key]
            shift = _end(other.parts[at]) - _end(base.parts[theirs[key]])
            live.append(outline.live[number] + level(shift.sum()))
            parts.append(outline.parts[number] + level(shift[:, None]))
            before = key
        else:  # the average's own, beside the state that the phase before it left
            shift = _end(outline.parts[ours[before]]) - _end(base.parts[theirs[before]])
            live.append(other.live[at] + level(shift.sum()))
            parts.append(other.parts[at] + level(shift[:, None]))
    start, slope = outline.work
    return replace(
        outline,
        phases=other.phases,
        live=tuple(live),
        parts=tuple(parts),
        work=(replace(start, step=start.step + (other.work[0].step - base.work[0].step)), slope),
        host=outline.host + level(other.host.start - base.host.start),
    )


def _end(parts: Line) -> Bytes:
    """What a phase leaves, by category, at the smallest micro-batch."""
    return parts.start[:, -1]
