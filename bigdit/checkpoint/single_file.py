"""Writes a whole model to one safetensors file, with few tensors in memory at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

import torch

from bigdit.models import Piece
from bigdit.units import in_groups

Kind = Literal["bf16", "fp8", "fp8_scaled"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FP8 = torch.float8_e4m3fn
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", _FP8: "F8_E4M3"}
_SCALED = "scaled_fp8"
"""The name that marks a file with scales. Two elements mean that products are computed in 16 bits, as in training.
Source: convert_old_quants in comfy/utils.py of ComfyUI 0.33.0, for files of earlier releases."""
_AT_ONCE = 2**27
"""The most elements that are in memory at a time, in fp32."""

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
    """Write the `pieces` of a model to `file` in bf16; the fp8 kinds have weights of blocks' linear layers in e4m3.

    `shapes`: of parameters, which `fill` fills by name. fp8_scaled has a scale for each fp8 weight. Raises OSError.
    """
    described = {name: tuple(each) for name, each in shapes.items()} | {
        name: tuple(each.shape) for name, each in buffers.items()
    }
    entries = {name: entry for piece in pieces for name, entry in _entries(piece, kind, described)}
    if kind == "fp8_scaled":
        entries[_SCALED] = _Entry(_FP8, (2,))
    with open(file, "wb") as opened:
        places = _write_header(opened, entries)
        for group in in_groups(pieces, lambda piece: sum(math.prod(described[s]) for s in piece.sources), _AT_ONCE):
            here = {name: torch.empty(described[name]) for piece in group for name in piece.sources if name in shapes}
            fill(here)
            here |= {name: buffers[name] for piece in group for name in piece.sources if name in buffers}
            for piece in group:
                for name, tensor in _stored(piece, kind, piece.of(here)):
                    opened.seek(places[name])
                    opened.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _write_header(opened: BinaryIO, entries: Mapping[str, _Entry]) -> dict[str, int]:
    """Write the header and set the file's length; returns where each tensor begins. Larger dtypes come first, so that
    each tensor is aligned. Source: https://huggingface.co/docs/safetensors, Format."""
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


def _stored(piece: Piece, kind: Kind, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The piece as it is written, and its scale. Values are clamped to fp8's range."""
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
