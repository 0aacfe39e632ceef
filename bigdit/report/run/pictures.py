"""Pictures of a run within its page: some of those that were drawn on the way, as small as the page allows."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from bigdit.files import read_bytes

MOST = 6
"""Shown of those that were drawn: the first, the last, and evenly between."""

ALL_BYTES = 1_200_000
"""Of all pictures together, as the page has them."""

_SMALLER = 0.75


class Shown(NamedTuple):
    """A picture after `step` steps: its address, which is the picture itself, and its size in pixels; of videos, of
    which it shows some frames, the file of all that lies beside it."""

    step: int
    address: str
    width: int
    height: int
    moving: str | None


def shown(pictures: Mapping[int, Path], notices: list[str]) -> list[Shown]:
    """Pictures to show, the newest first; one that cannot be read is left out, and said."""
    steps = chosen(sorted(pictures))
    found = []
    for step in reversed(steps):
        try:
            kind, data, size = _at_most(pictures[step], ALL_BYTES * 3 // 4 // len(steps))
        except OSError as error:  # PIL's errors of a damaged picture too
            notices.append(f"{pictures[step]} cannot be read: {error.strerror or error}; it is left out")
            continue
        address = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        animation = pictures[step].with_suffix(".webp")
        found.append(Shown(step, address, *size, animation.name if animation.exists() else None))
    return found


def chosen(steps: Sequence[int]) -> list[int]:
    """At most MOST of these."""
    last = len(steps) - 1
    places = range(len(steps)) if last < MOST else (round(number * last / (MOST - 1)) for number in range(MOST))
    return [steps[place] for place in places]


def _at_most(path: Path, most: int) -> tuple[str, bytes, tuple[int, int]]:
    """Kind, bytes and size of a picture: its own file, or a JPEG that is made smaller until it has so few bytes."""
    from PIL import Image

    data = read_bytes(path)
    with Image.open(BytesIO(data)) as picture:
        picture.load()
        size, pixels = picture.size, picture.convert("RGB")
    if len(data) <= most:
        return "png", data, size
    while True:
        buffer = BytesIO()
        pixels.save(buffer, "jpeg", quality=85)
        if buffer.tell() <= most:
            return "jpeg", buffer.getvalue(), pixels.size
        width, height = (max(1, round(_SMALLER * side)) for side in pixels.size)
        pixels = pixels.resize((width, height), Image.Resampling.LANCZOS)
