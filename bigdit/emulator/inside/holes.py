"""safetensors files whose data is a hole: the right header, the right length, hardly any disk; they load as zeros."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_ALIGNMENT = 8

# Source: safetensors' format, `Dtype` (safetensors/src/tensor.rs in huggingface/safetensors).
DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
"""The format's name of each dtype, by torch's and numpy's, and the bytes of an element."""


class Entry(NamedTuple):
    """One tensor of a file: its name, its dtype as torch writes it without `torch.`, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def nbytes(entry: Entry) -> int:
    """The bytes of a tensor's data. Raises KeyError for a dtype that the format does not have."""
    count = DTYPES[entry.dtype][1]
    for size in entry.shape:
        count *= size
    return count


def header(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """The header of a file with these tensors, and how many bytes of data follow it: the widest elements first, so
    that each tensor is aligned, as safetensors orders them.

    Raises KeyError for a dtype that the format does not have.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in sorted(entries, key=lambda entry: (-DTYPES[entry.dtype][1], entry.name)):
        begin, end = end, end + nbytes(entry)
        fields[entry.name] = {
            "dtype": DTYPES[entry.dtype][0],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, end


def write(path: str | os.PathLike[str], entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> int:
    """Write such a file in the place of any other; the bytes that its data seems to have. The file system has to keep
    holes: on one that does not, the data takes its room. Raises OSError where the file cannot be written."""
    head, data_bytes = header(entries, metadata)
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + data_bytes)
    return data_bytes
