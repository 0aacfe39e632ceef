"""Find numbers with units in text, and compare them with a document's numbers."""

import html
import re
from collections.abc import Iterator

from bigdit.report import words
from bigdit.units import GIB, KIB, MIB, count

BYTES = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}
SECONDS = {"days": 86_400, "h": 3_600, "min": 60, "s": 1, "ms": 1e-3}
COUNTS = {"B": 1e9, "M": 1e6, "k": 1e3}

UNITS = "|".join(sorted(BYTES | SECONDS | COUNTS | {"%": 1}, key=len, reverse=True))
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
QUANTITY = re.compile(rf"({NUMBER})(?:–({NUMBER}))?(?: ({UNITS})(?!\w))?")

Quantity = tuple[str, str]
"""A number as shown, and its unit: of bytes, time, a count, a share, or none."""


def leaves(value: object) -> Iterator[str | float]:
    """All numbers, texts and keys of a JSON document."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    if isinstance(value, dict):
        yield from value
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


def quantities(text: str) -> set[Quantity]:
    """The numbers of a text with their units. A range gives both ends."""
    found = [match.groups() for match in QUANTITY.finditer(text)]
    return {(number, unit or "") for first, last, unit in found for number in (first, last) if number}


def visible(text: str) -> str:
    """The visible text of a page, without its images, which have their own scales."""
    text = re.sub(r"<(svg|style|script).*?</\1>", "", text, flags=re.DOTALL)
    return html.unescape(re.sub("<[^>]+>", " ", text))


def reads(value: float, number: str, unit: str) -> bool:
    """Whether `value` is shown as this number with this unit."""
    if unit == "%":
        return number in (f"{value:.1f}", f"{value:.2g}")
    if unit in COUNTS and count(value) == f"{number} {unit}":
        return True
    if unit in BYTES:
        shown = value / BYTES[unit]
        return number in (f"{shown:,.2f}", f"{shown:,.0f}")
    return number in (words.number(value / SECONDS.get(unit, 1)), f"{value:,}", f"{value:g}")
