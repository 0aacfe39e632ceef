"""Sparse files: safetensors files that are holes, saved files with holes, and holes that load as zeros without RAM.

Beyond the first MiB of a saved file, its large tensors are holes: an emulated GPU computes small ones only. This covers
torch.save (and so torch.distributed.checkpoint and DeepSpeed's checkpoints) and safetensors. Fake weights are
holes too. Files with holes that torch maps take no page of the system's cache, and no page fault, until they are
written to. This covers safetensors, and torch.load with `mmap=True`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from . import imports, libraries, notices
from .imports import replacing
from .known import LIMIT_BYTES

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
"""The format's name of each dtype of torch, and the bytes of an element."""


class SparseEntry(NamedTuple):
    """One tensor of a file: its name, its dtype (torch's name without `torch.`), and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def nbytes(entry: SparseEntry) -> int:
    """The bytes of a tensor's data. Raises KeyError for an unsupported dtype."""
    count = DTYPES[entry.dtype][1]
    for size in entry.shape:
        count *= size
    return count


def header(entries: Iterable[SparseEntry], metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """The header of a file with these tensors, and the bytes of its data.

    The widest elements come first, as in safetensors, so that each tensor is aligned. Raises KeyError for an
    unsupported dtype.
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


def write(
    path: str | os.PathLike[str], entries: Iterable[SparseEntry], metadata: Mapping[str, str] | None = None
) -> int:
    """Write a safetensors file whose data is a hole; returns the bytes of the data. On a file system without holes, the
    data takes disk. Raises OSError if the file cannot be written."""
    head, data_bytes = header(entries, metadata)
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + data_bytes)
    return data_bytes


WHOLE_BYTES = 2**20
"""The bytes of a file's tensors that are written as they are."""

_now = threading.local()


def install(torch: Any) -> None:
    """Have files saved with holes, and holes loaded as zeros."""
    install_saving(torch)
    install_loading(torch)


def install_saving(torch: Any) -> None:
    """Have torch.save write holes for large storages after the first MiB of a file; the same for safetensors."""
    replacing(torch._C.PyTorchFileWriter, "write_record")(_write_record)
    torch.save = torch.serialization.save = _saving(torch.save)
    imports.after("safetensors.torch", _save_safetensors)


def _saving(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        file = f if isinstance(f, (str, os.PathLike)) else _seekable(f)
        if file is None:  # a buffer in memory, or a pipe
            return save(obj, f, *args, **kwargs)
        kwargs["_use_new_zipfile_serialization"] = True  # the old format cannot have holes
        _now.room, _now.left_out = WHOLE_BYTES, 0
        try:
            save(obj, file, *args, **kwargs)
        finally:
            left_out, _now.room = _now.left_out, None
        if left_out:
            notices.add("torch.save: a saved file has zeros instead of its large tensors, which take no disk")
        return None

    return saving


def _write_record(write_record: Callable[..., None], self: Any, name: str, data: Any, size: int) -> None:
    room = getattr(_now, "room", None)
    if room is None or not hasattr(data, "data_ptr"):
        write_record(self, name, data, size)
    elif size <= max(room, LIMIT_BYTES):  # small ones have values: a mask, a step, a scale
        _now.room = max(room - size, 0)
        write_record(self, name, data, size)
    else:
        _now.left_out += size
        self.write_record_metadata(name, size)


class _Seeking:
    """A stream with the `seek` of the file that it wraps. The one of torch.distributed.checkpoint has none."""

    def __init__(self, stream: Any, file: Any) -> None:
        self._stream, self._file = stream, file
        self.write, self.flush = stream.write, stream.flush

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._stream.flush()
        found: int = self._file.seek(offset, whence)
        return found


def _seekable(stream: Any) -> Any:
    """The stream, if it writes to a file on disk without compression; else None."""
    file = stream
    while type(file).__name__ == "NoCloseWriter" and hasattr(file, "raw"):
        file = file.raw
    try:
        on_disk = type(file).__module__ in ("_io", "io", "tempfile") and file.fileno() >= 0 and file.seekable()
    except (AttributeError, OSError):
        return None
    if not on_disk:
        return None
    return stream if file is stream else _Seeking(stream, file)


def _save_safetensors(module: Any) -> None:
    """Have `save_file` of safetensors.torch write its header, followed by a hole."""

    @replacing(module, "save_file")
    def saving(save_file: Any, tensors: Any, filename: Any, metadata: dict[str, str] | None = None) -> None:
        entries = _tensor_entries(module, tensors)
        if entries is None or sum(map(nbytes, entries)) <= WHOLE_BYTES:
            save_file(tensors, filename, metadata)
            return
        write(filename, entries, metadata)
        notices.add("safetensors: a saved file has zeros instead of its tensors, which take no disk")


def _tensor_entries(module: Any, tensors: Any) -> list[SparseEntry] | None:
    """The tensors of the file; None if safetensors would raise."""
    if not isinstance(tensors, dict):
        return None
    entries = []
    for name, tensor in tensors.items():
        dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
        if dtype not in DTYPES or str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
            return None
        entries.append(SparseEntry(name, dtype, tuple(tensor.shape)))
    shared = any(len(names) > 1 for names in module._find_shared_tensors(tensors))
    return None if shared else entries


_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # older Pythons have no name for it
_AT_ONCE = 1 << 30  # bytes of a read; Linux reads at most 2 GiB


def install_loading(torch: Any) -> None:
    """Have torch map files that are mostly holes as zeros, into which their data is copied."""
    from_file = torch.UntypedStorage.from_file

    @functools.wraps(from_file)
    def mapped(filename: Any, shared: bool = False, nbytes: int = 0, **named: Any) -> Any:
        size = nbytes or named.get("size", 0)
        there = size and not shared and os.path.isfile(filename)  # torch reports missing files
        memory = _zeros_with_data(filename, size) if there else None
        if memory is None:
            return from_file(filename, shared, size)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    torch.UntypedStorage.from_file = staticmethod(mapped)


def _zeros_with_data(path: str | os.PathLike[str], size: int) -> _Zeros | None:
    """Zeros with the file's data; None if the file is not mostly holes, or shorter than `size`."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < size:
            return None
        ranges = list(_data(file.fileno(), size))
        if 2 * sum(end - begin for begin, end in ranges) > size:
            return None
        memory = _Zeros(size)
        for begin, end in ranges:
            memory[begin:end] = os.pread(file.fileno(), end - begin, begin)
    return memory


class _Zeros(mmap.mmap):
    """A private map of zeros, whose pages take no RAM until they are written. c/blank.c tracks which pages were."""

    _address: ctypes.c_void_p
    _forget: Any

    def __new__(cls, size: int) -> _Zeros:
        made = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            made.madvise(mmap.MADV_HUGEPAGE)
        made._forget = None
        if libraries.loaded:
            host, address = libraries.library("libbigdit-host"), ctypes.addressof(ctypes.c_char.from_buffer(made))
            host.blank_remember(ctypes.c_void_p(address), ctypes.c_size_t(size))
            made._forget, made._address = host.blank_forget, ctypes.c_void_p(address)
        return made

    def __del__(self) -> None:
        if self._forget is not None:  # before the system reuses the addresses
            self._forget(self._address)


def _data(file: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file with data. Source: lseek(2); ENXIO means that no data follows."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError:
            return
        if begin >= size:
            return
        end = min(os.lseek(file, begin, os.SEEK_HOLE), size, begin + _AT_ONCE)
        yield begin, end
