"""Which columns of a table hold pictures and captions or labels, and the captions of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bigdit.config.data import SourceConfig
from bigdit.errors import UserError, nearest
from bigdit.sources.captions import weighted
from bigdit.sources.protocol import Caption, Unusable
from bigdit.units import how_many

# What a column's cells are: encoded pictures, a text (of CSV: anything), several texts, numbers, something else.
Cells = Literal["picture", "text", "texts", "numbers", "other"]

IMAGE_COLUMNS = ("image", "path", "image_path", "file", "file_name", "filename", "filepath")
CAPTION_COLUMNS = ("caption", "captions", "text")


@dataclass(frozen=True)
class Columns:
    """The column of pictures or of their paths, and each caption column with its weight, a number or the column
    that holds it; or the column of labels."""

    image: str
    captions: tuple[tuple[str, float | str], ...]
    label: str | None = None

    @property
    def names(self) -> list[str]:
        """All of them, each once."""
        weights = [weight for _, weight in self.captions if isinstance(weight, str)]
        labels = [] if self.label is None else [self.label]
        return list(dict.fromkeys([self.image, *(column for column, _ in self.captions), *weights, *labels]))

    def __repr__(self) -> str:
        """What a store's digest is of: of captions alone as it was before there were labels."""
        label = "" if self.label is None else f", label={self.label!r}"
        return f"Columns(image={self.image!r}, captions={self.captions!r}{label})"


def choose(config: SourceConfig, found: Mapping[str, Cells], where: str, key: str) -> Columns:
    """The columns that `config` asks for, or those of the usual names, in the table `where`.

    Raises UserError with every column that is missing, of another type, or must be named.
    """
    problems: list[str] = []
    image = config.image or _usual(found, IMAGE_COLUMNS, ("picture", "text"), problems, where, f"{key}.image")
    captions = config.captions
    if not captions and config.label is None:
        usual = _usual(found, CAPTION_COLUMNS, ("text", "texts"), problems, where, f"{key}.captions")
        captions = {usual: 1.0} if usual else {}
    wanted: list[tuple[str, str, tuple[Cells, ...]]] = [("image", image, ("picture", "text"))] if image else []
    for column, weight in captions.items():
        wanted.append(("captions", column, ("text", "texts")))
        if isinstance(weight, str):
            wanted.append(("captions", weight, ("numbers", "text")))  # in CSV, numbers are text
    if config.label is not None:
        wanted.append(("label", config.label, ("text", "numbers")))
    for setting, column, kinds in wanted:
        if column not in found:
            problems.append(f"{key}.{setting}: {where} has no column {column}; {nearest(column, found)}")
        elif found[column] not in kinds:
            problems.append(f"{key}.{setting}: column {column} of {where} holds {found[column]}, not {kinds[0]}")
    if problems or image is None:
        raise UserError(*problems)
    return Columns(image, tuple(captions.items()), config.label)


def captions_of(row: Mapping[str, Any], columns: Columns) -> tuple[Caption, ...]:
    """The captions of a row; each text of a list has the weight of its column, or its own of a list of weights.

    Raises Unusable as `weighted`.
    """
    texts: list[Any] = []
    weights: list[Any] = []
    for column, weight in columns.captions:
        cell = row[column]
        if cell is None:
            continue
        listed = cell if isinstance(cell, list) else [cell]
        share = _numbers(row[weight], weight) if isinstance(weight, str) else weight
        shares = share if isinstance(share, list) else [share] * len(listed)
        if len(shares) != len(listed):
            found = f"{how_many(len(listed), 'text')} and {how_many(len(shares), 'weight')}"
            raise Unusable(f"caption column {column} has {found}")
        texts += listed
        weights += shares
    return weighted(texts, weights, "column " + ", ".join(column for column, _ in columns.captions))


def _usual(
    found: Mapping[str, Cells],
    names: Sequence[str],
    kinds: Sequence[Cells],
    problems: list[str],
    where: str,
    key: str,
) -> str | None:
    """The one column of a usual name, or else the one of embedded pictures where such are looked for."""
    usual = [name for name in names if found.get(name) in kinds]
    usual = usual or [name for name, cells in found.items() if cells == "picture" and "picture" in kinds]
    if len(usual) == 1:
        return usual[0]
    several = f"has {', '.join(usual)}: say which is meant" if usual else f"has none of {', '.join(names)}"
    problems.append(f"{key}: {where} {several}; its columns: {', '.join(list(found)[:20]) or 'none'}")
    return None


def _numbers(cell: Any, column: str) -> Any:
    """The cell, a number where CSV gives it as text."""
    if not isinstance(cell, str):
        return cell
    try:
        return float(cell)
    except ValueError:
        raise Unusable(f"weight column {column} holds {cell!r}, not a number") from None
