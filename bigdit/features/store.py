"""The store as training reads it: opened by its headers, read row by row at their offsets."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from bigdit.errors import UserError
from bigdit.features import null_text
from bigdit.features.header import Header, read_header
from bigdit.features.part import Shape, part_path, shape_name
from bigdit.features.reader import FileReader
from bigdit.features.schema import EXTRACT, StoreSchema, read_schema


class BucketRows:
    """The samples of one bucket in source order: position i is (part, row). Memory grows with parts alone."""

    def __init__(self, parts: Sequence[int], counts: Sequence[int]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(position)
        at = bisect.bisect_right(self._ends, position)
        return self._parts[at], position - (self._ends[at - 1] if at else 0)


class FeatureStore:
    """Latents and text of a source, by bucket (C, H, W) and position; open it with `FeatureStore.open`."""

    def __init__(self, root: Path, schema: StoreSchema, parts: list[Header]) -> None:
        self.root = root
        self.schema = schema
        self.parts = parts
        found: dict[Shape, list[tuple[int, int]]] = defaultdict(list)
        for number, part in enumerate(parts):
            for shape, count in part.shapes().items():
                found[shape].append((number, count))
        self.buckets = {shape: BucketRows(*zip(*found[shape], strict=True)) for shape in sorted(found)}

    @classmethod
    def open(cls, root: Path) -> FeatureStore:
        """Read the headers of all parts. Raises UserError where parts are missing, damaged, or all empty."""
        schema = read_schema(root)
        if schema is None:
            raise UserError(f"data.features: {root} holds no features; {EXTRACT} makes them")
        paths = [part_path(root, start, end) for start, end in schema.ranges()]
        missing = [path for path in (*paths, root / null_text.FILE) if not path.exists()]
        if missing:
            raise UserError(
                f"data.features: {root} lacks {len(missing)} of {len(paths) + 1} files, the first {missing[0].name}; "
                f"{EXTRACT} finishes it"
            )
        store = cls(root, schema, [read_header(path) for path in paths])
        if not store.buckets:
            raise UserError(f"data.features: all pictures of {root} were skipped; report.json there says why")
        return store

    @property
    def max_tokens(self) -> int:
        """The most tokens that a text has."""
        return int(self.schema.text_encoder["max_tokens"])

    @functools.cached_property
    def null_text(self) -> torch.Tensor:
        """Hidden states [len, dim] of the empty caption, for guidance."""
        return null_text.read_null_text(self.root)

    def read(self, bucket: Shape, positions: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """Latents [B, C, H, W] fp32, texts [len_i, dim] as stored, source indices of samples of one bucket.

        Raises UserError, with part and row, where the bytes on the disk are not those that were written.
        """
        wanted: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for place, position in enumerate(positions):
            part, row = self.buckets[bucket][position]
            wanted[part].append((place, row))
        dtype = self.parts[next(iter(wanted))].columns[f"latents/{shape_name(bucket)}"].dtype
        latents = torch.empty((len(positions), *bucket), dtype=dtype)
        texts: dict[int, torch.Tensor] = {}
        indices: dict[int, int] = {}
        for part, rows in wanted.items():
            with FileReader(self.parts[part]) as reader:
                for place, row in rows:
                    indices[place], texts[place] = reader.sample(bucket, row, latents[place])
        places = range(len(positions))
        return latents.float(), [texts[place] for place in places], [indices[place] for place in places]
