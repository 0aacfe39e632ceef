"""A whole model in one safetensors file, a few tensors at a time: the model is never whole in memory."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

import torch

from bigdit.models import Piece

Kind = Literal["bf16", "fp8", "fp8_scaled"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FP8 = torch.float8_e4m3fn
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", _FP8: "F8_E4M3"}
_SCALED = "scaled_fp8"
"""The mark of a file with scales. Two elements: products are computed in 16 bits, as the weights were trained. Source:
convert_old_quants in comfy/utils.py of ComfyUI 0.33.0, which reads files of earlier releases by it."""
_AT_ONCE = 2**27
"""Elements that are read together in fp32."""

Shapes = Mapping[str, Sequence[int]]


class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_single_file(
    file: Path,
    kind: Kind,
    pieces: Sequence[Piece],
    shapes: Shapes,
    buffers: Mapping[str, torch.Tensor],
    fill: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    """Write the `pieces` of a model to `file`: bf16, or weights of the blocks' linear layers in fp8 (e4m3).

    `shapes`: of parameters, which `fill` fills by name; others are `buffers`. fp8_scaled has a scale for each such
    weight. Raises OSError.
    """
    described = {name: tuple(each) for name, each in shapes.items()} | {
        name: tuple(each.shape) for name, each in buffers.items()
    }
    entries = {name: entry for piece in pieces for name, entry in _entries(piece, kind, described)}
    if kind == "fp8_scaled":
        entries[_SCALED] = _Entry(_FP8, (2,))
    with open(file, "wb") as opened:
        places = _write_header(opened, entries)
        for group in _groups(pieces, described):
            here = {name: torch.empty(described[name]) for piece in group for name in piece.sources if name in shapes}
            fill(here)
            here |= {name: buffers[name] for piece in group for name in piece.sources if name in buffers}
            for piece in group:
                for name, tensor in _stored(piece, kind, piece.of(here)):
                    opened.seek(places[name])
                    opened.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _write_header(opened: BinaryIO, entries: Mapping[str, _Entry]) -> dict[str, int]:
    """Where in the file each tensor begins; the file has its length then. Larger dtypes come first, so that each
    tensor is aligned. Source: https://huggingface.co/docs/safetensors, Format."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, starts = 0, {}
    for name, entry in sorted(entries.items(), key=lambda each: -each[1].dtype.itemsize):
        starts[name], end = end, end + entry.nbytes
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    opened.write(struct.pack("<Q", len(text)) + text)
    first = opened.tell()
    opened.truncate(first + end)
    return {name: first + start for name, start in starts.items()}


def _entries(piece: Piece, kind: Kind, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, _Entry]]:
    parts = [shapes[source] for source in piece.sources]
    shape = (sum(each[0] for each in parts), *parts[0][1:]) if parts[0] else ()
    yield piece.name, _Entry(_dtype(piece, kind), (math.prod(shape),) if piece.flat else shape)
    if piece.linear and kind == "fp8_scaled":
        yield _scale_of(piece), _Entry(torch.float32, ())


def _dtype(piece: Piece, kind: Kind) -> torch.dtype:
    return _FP8 if piece.linear and kind != "bf16" else torch.bfloat16


def _scale_of(piece: Piece) -> str:
    return f"{piece.name.removesuffix('.weight')}.scale_weight"


def _groups(pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[Piece]]:
    """As many at a time as are small enough together."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        own = sum(math.prod(shapes[source]) for source in piece.sources)
        if group and size + own > _AT_ONCE:
            yield group
            group, size = [], 0
        group.append(piece)
        size += own
    yield group


def _stored(piece: Piece, kind: Kind, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The piece as it is written, and its scale. Values beyond fp8's largest become that."""
    if _dtype(piece, kind) != _FP8:
        yield piece.name, tensor.bfloat16()
        return
    most = torch.finfo(_FP8).max
    if kind == "fp8_scaled":
        scale = tensor.abs().amax().float() / most
        scale = scale.where(scale > 0, 1.0)
        yield _scale_of(piece), scale
        tensor = tensor / scale
    yield piece.name, tensor.clamp(-most, most).to(_FP8)
