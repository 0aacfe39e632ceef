"""Many names in little memory: blocks of them, compressed, of which one is open at a time."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterable, Iterator

BLOCK = 1024


class Names:
    """File names in their order: 2 bytes each where they are numbered, 21 where they are 32 random characters."""

    def __init__(self, names: Iterable[str]) -> None:
        self._blocks: list[bytes] = []
        self._count = 0
        names = iter(names)
        while block := list(itertools.islice(names, BLOCK)):
            self._count += len(block)
            # No file name holds a zero byte.
            self._blocks.append(zlib.compress(b"\0".join(map(os.fsencode, block)), level=1))

    def __len__(self) -> int:
        return self._count

    def range(self, start: int, end: int) -> Iterator[str]:
        """Names [start, end)."""
        for number in range(start // BLOCK, -(-min(end, self._count) // BLOCK)):
            first = number * BLOCK
            names = zlib.decompress(self._blocks[number]).split(b"\0")
            yield from map(os.fsdecode, names[max(start - first, 0) : end - first])
