"""Operators that the rehearsal is known to have otherwise than CUDA, each with what it is: the one list of them."""

from __future__ import annotations

KNOWN: dict[str, str] = {}
"""By the operator's name as the referee gives it; a peak that differs by any other is a failure."""
