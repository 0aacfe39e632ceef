"""Whole numbers that an option lists with commas."""

from __future__ import annotations

from bigdit.errors import UserError


def listed(option: str, text: str, what: str, largest: int) -> list[int]:
    """The numbers of `text`, none twice. Raises UserError for anything else, with `what` is expected, such as
    `sizes such as 1,2,4,8`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= largest for number in numbers):
        raise UserError(f"{option} expects {what}, each from 1 to {largest}, and {text[:40]!r} was found")
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise UserError(f"{option} {text[:40]} says {twice[0]} twice; leave one of them out")
    return numbers
