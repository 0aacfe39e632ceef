"""The source that `data.images` describes: each of its list opened by its kind, and all of them one after another."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from bigdit.config.run import DataConfig, SourceConfig
from bigdit.features.sources.folder import ImageFolder
from bigdit.features.sources.protocol import Item, Sample, Source


@dataclass(frozen=True)
class ListedItem:
    """An item of one source of the list, under its index in the whole list."""

    index: int
    name: str
    item: Item

    def load(self) -> Sample:
        """As Item.load."""
        return self.item.load()


class SourceList:
    """Sources one after another. What is appended to the list leaves the indices before it as they were."""

    def __init__(self, sources: Sequence[Source], labels: Sequence[str]) -> None:
        self.sources = sources
        self._labels = labels
        self._ends = list(itertools.accumulate(len(source) for source in sources))
        identities = [source.identity for source in sources]
        digest = xxhash.xxh3_128_hexdigest("\n".join(identity["digest"] for identity in identities).encode())
        self.identity: dict[str, Any] = {
            "kind": "list",
            "count": self._ends[-1],
            "digest": digest,
            "sources": identities,
        }

    def __len__(self) -> int:
        return self._ends[-1]

    def items(self, start: int, end: int) -> list[ListedItem]:
        """Items [start, end) of the whole list; names start with their source where there are several."""
        found: list[ListedItem] = []
        for number in range(bisect.bisect_right(self._ends, start), len(self.sources)):
            first = self._ends[number - 1] if number else 0
            if first >= end:
                break
            prefix = f"{self._labels[number]}: " if len(self.sources) > 1 else ""
            inner = self.sources[number].items(max(start - first, 0), min(end, self._ends[number]) - first)
            found += [ListedItem(first + item.index, prefix + item.name, item) for item in inner]
        return found


def open_source(data: DataConfig) -> SourceList:
    """List what `data.images` names, without reading pictures.

    Raises UserError, naming the source, where one is missing, empty, of no known kind, damaged or hostile.
    """
    sources = []
    for number, config in enumerate(data.images):
        key = "data.images" if len(data.images) == 1 else f"data.images[{number}]"
        sources.append(_open(config, key))
    return SourceList(sources, [str(config.path) for config in data.images])


def _open(config: SourceConfig, key: str) -> Source:
    return ImageFolder(config.path, key)
