"""Kernels, copies and synchronisations of each step, from the libraries' counters."""

from __future__ import annotations

_MOST = 1000
_last: dict[str, int] = {}
by_step: list[dict[str, int]] = []


def read() -> dict[str, int]:
    """The counters since the process began; none where the libraries have none."""
    try:
        from . import counts
    except ImportError:
        return {}
    return counts.read()


def refused() -> list[str]:
    """Functions of the libraries that were called and have no answer."""
    try:
        from . import counts
    except ImportError:
        return []
    return counts.refused()


def sample() -> None:
    """Note what was counted since the last step ended."""
    global _last
    now = read()
    if len(by_step) < _MOST:
        by_step.append({name: count - _last.get(name, 0) for name, count in now.items()})
    _last = now


def forget() -> None:
    global _last
    _last = {}
    by_step.clear()
