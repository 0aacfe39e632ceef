"""What two sequences do not have in common, by the shortest edit script between them.

Source: E. W. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986), the greedy algorithm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_MOST_EDITS = 800
"""Beyond as many edits only how often each value is there is compared: the script would take minutes."""


def unmatched(left: Sequence[int], right: Sequence[int]) -> tuple[list[int], list[int]]:
    """The indices of what is only on the left, and of what is only on the right, ascending."""
    start = 0
    while start < min(len(left), len(right)) and left[start] == right[start]:
        start += 1
    ends = _edits(left[start:], right[start:])
    if ends is None:
        return _beyond(left, right), _beyond(right, left)
    return [start + i for i in ends[0]], [start + i for i in ends[1]]


def _edits(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Deletions from `a` and insertions of `b`; None where there are too many."""
    furthest = {1: 0}
    history: list[dict[int, int]] = []
    for edits in range(min(len(a) + len(b), _MOST_EDITS) + 1):
        history.append(furthest.copy())
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            y = x - k
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
            furthest[k] = x
            if x >= len(a) and y >= len(b):
                return _traced(history, len(a), len(b))
    return None


def _traced(history: list[dict[int, int]], x: int, y: int) -> tuple[list[int], list[int]]:
    deleted: list[int] = []
    inserted: list[int] = []
    for edits in range(len(history) - 1, 0, -1):
        furthest, k = history[edits], x - y
        down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
        before = k + 1 if down else k - 1
        x, y = furthest[before], furthest[before] - before
        (inserted if down else deleted).append(y if down else x)
    return deleted[::-1], inserted[::-1]


def _beyond(values: Sequence[int], others: Sequence[int]) -> list[int]:
    excess = Counter(values) - Counter(others)
    found = []
    for i, value in enumerate(values):
        if excess[value] > 0:
            excess[value] -= 1
            found.append(i)
    return found
