"""One part of a store: the features of one range of the source, in one safetensors file.

A part's name is its record of completion. It holds, for each shape C×H×W of latents:
  `latents/CxHxW` [n, C, H, W] and `rows/CxHxW` int64 [n, 4] = (source index, text start, text length, digest),
and for all of them `text` [tokens, dim], the distinct captions' hidden states one after another, and `captions`,
bytes of a JSON object of source index to caption. Row i is thus three reads at known offsets. What was skipped
stands as JSON in the header's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bigdit.features.digest import sample_digest
from bigdit.features.tensors import commit_tensors

Shape = tuple[int, int, int] | tuple[int, int, int, int]


@dataclass(frozen=True)
class Skipped:
    """A picture of the source that has no features, and why."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Encoded:
    """The features of one range: latents [n, C, H, W] and source indices of each shape; captions by source
    index; the hidden states [len, dim] of each distinct caption."""

    latents: Mapping[Shape, torch.Tensor]
    indices: Mapping[Shape, list[int]]
    captions: Mapping[int, str]
    texts: Mapping[str, torch.Tensor]
    skipped: list[Skipped]


def part_path(root: Path, start: int, end: int) -> Path:
    """The file of the source range [start, end)."""
    return root / f"part-{start:012d}-{end:012d}.safetensors"


def shape_name(shape: Shape) -> str:
    """C×H×W as it stands in tensor names and reports: `4x64x64`."""
    return "x".join(str(side) for side in shape)


def write_part(path: Path, encoded: Encoded) -> None:
    """Write and commit a part; the same features give the same bytes. Raises UserError where it cannot."""
    starts, tokens = {}, 0
    for caption, text in encoded.texts.items():
        starts[caption] = tokens
        tokens += len(text)
    captions = json.dumps({str(index): caption for index, caption in encoded.captions.items()})
    tensors = {"captions": torch.from_numpy(np.frombuffer(captions.encode(), np.uint8).copy())}
    if encoded.texts:
        tensors["text"] = torch.cat(list(encoded.texts.values()))
    for shape, latents in encoded.latents.items():
        rows = []
        for index, sample in zip(encoded.indices[shape], latents, strict=True):
            caption = encoded.captions[index]
            text = encoded.texts[caption]
            rows.append((index, starts[caption], len(text), sample_digest(index, sample, text)))
        tensors[f"latents/{shape_name(shape)}"] = latents
        tensors[f"rows/{shape_name(shape)}"] = torch.tensor(rows, dtype=torch.int64)
    skipped = json.dumps([[item.index, item.name, item.reason] for item in encoded.skipped])
    commit_tensors(path, tensors, {"skipped": skipped})
