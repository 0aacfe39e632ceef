"""What a round saw."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

AFTER = "when it had ended"


@dataclass
class Seen:
    """The fault, what was damaged or where each disturbance landed, and how attempts and round ended."""

    fault: str
    landed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
