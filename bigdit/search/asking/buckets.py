"""Sizes in pixels: as people write them, and the usual aspect ratios at the area of one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bigdit.catalog import CatalogModel
from bigdit.errors import UserError
from bigdit.profile.request import parse_resolution

Size = tuple[int, int]
"""Height and width."""
Asked = int | str | Size
"""1024 is a square, "480x832" and (480, 832) are height and width; "1024,480x832" names several sizes."""

ASPECTS: tuple[Size, ...] = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16))
"""Width to height of the usual formats of pictures, for `aspect`."""


def parse_sizes(option: str, asked: Asked | Sequence[Asked]) -> tuple[Size, ...]:
    """All sizes that `asked` names, in its order; a list holds several. Raises UserError with the `option`'s name."""
    if isinstance(asked, list):
        return tuple(size for each in asked for size in parse_sizes(option, each))
    if isinstance(asked, str):
        return tuple(_square(parse_resolution(part, option)) for part in asked.split(","))
    if isinstance(asked, int):
        return (_square(parse_resolution(str(asked), option)),)
    if isinstance(asked, tuple) and len(asked) == 2 and all(isinstance(side, int) for side in asked):
        return (_square(parse_resolution("x".join(map(str, asked)), option)),)
    raise UserError(f"{option} expects pixels such as 1024, (480, 832) or a list of them, and {asked!r} was found")


def aspect_sizes(model: CatalogModel, size: Size) -> tuple[Size, ...]:
    """The usual aspect ratios at about the area of `size`, with sides that the VAE and the patches divide;
    for a model of squares alone the `size` itself."""
    if model.square:
        return (size,)
    multiple = model.vae.downsample * model.patch_size
    area = size[0] * size[1]

    def side(pixels: float) -> int:
        return max(round(pixels / multiple), 1) * multiple

    return tuple((side(math.sqrt(area * high / wide)), side(math.sqrt(area * wide / high))) for wide, high in ASPECTS)


def written(size: Size) -> str:
    """As `parse_sizes` reads it: `1024`, `480x832`."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def _square(parsed: int | Size) -> Size:
    return (parsed, parsed) if isinstance(parsed, int) else parsed
