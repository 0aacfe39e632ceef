"""Class labels as a store has them: numbers from 0 on, by the names that sources give them."""

from __future__ import annotations

from bigdit.errors import UserError, nearest

Known = list[str] | int
"""The names of classes 0, 1, …; or how many there are, where labels are the numbers themselves."""


class Classes:
    """The numbers of classes by their names."""

    def __init__(self, known: Known) -> None:
        self._numbers = {} if isinstance(known, int) else {name: number for number, name in enumerate(known)}
        self.count = known if isinstance(known, int) else len(known)

    def number(self, label: str | int) -> int:
        """The class of a label: of that name, or of that number. Raises UserError where there is none."""
        if isinstance(label, str) and label in self._numbers:
            return self._numbers[label]
        number = _whole(label)
        if number is not None and 0 <= number < self.count:
            return number
        numbers = f"0 to {self.count - 1}"
        known = f"known: {numbers}"
        if self._numbers:
            known = f"{nearest(str(label), self._numbers)} (their numbers, {numbers}, go too)"
        raise UserError(f"there is no class {str(label)[:40]!r}; {known}")


def _whole(label: str | int) -> int | None:
    if isinstance(label, int):
        return label
    return int(label) if label.isascii() and label.isdecimal() and len(label) < 19 else None
