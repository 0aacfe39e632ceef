"""What scripts save takes hardly any disk: beyond a first MiB a file's data is a hole in it, which loads as zeros.

What was computed on an emulated card is zeros for the most part anyway. Files below a MiB are written as they are.
Covered are torch.save, and with it torch.distributed.checkpoint and DeepSpeed's checkpoints, and safetensors.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from . import holes, imports, notices

WHOLE_BYTES = 2**20
"""So much of the tensors of one file is written as it is."""

_now = threading.local()


def install(torch: Any) -> None:
    """Have torch.save, and safetensors where it is imported, leave holes."""
    install_torch(torch)
    imports.after("safetensors.torch", install_safetensors)


def install_torch(torch: Any) -> None:
    """Have torch.save leave holes for the storages that come after the first MiB of a file."""
    writer = torch._C.PyTorchFileWriter
    writer.write_record = _writing_record(writer.write_record)
    save = _saving(torch.save)
    torch.save = torch.serialization.save = save


def _saving(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        file = f if isinstance(f, (str, os.PathLike)) else _seekable(f)
        if file is None:  # a buffer in memory, or a pipe
            return save(obj, f, *args, **kwargs)
        kwargs["_use_new_zipfile_serialization"] = True  # the old format, which few still ask for, has no holes
        _now.room, _now.left_out = WHOLE_BYTES, 0
        try:
            save(obj, file, *args, **kwargs)
        finally:
            left_out, _now.room = _now.left_out, None
        if left_out:
            notices.add("torch.save: a saved file holds zeros in the place of its large tensors, which take no disk")
        return None

    return saving


def _writing_record(write_record: Callable[..., None]) -> Callable[..., None]:
    def writing_record(self: Any, name: str, data: Any, size: int) -> None:
        room = getattr(_now, "room", None)
        if room is None or not hasattr(data, "data_ptr"):
            write_record(self, name, data, size)
        elif size <= room:
            _now.room = room - size
            write_record(self, name, data, size)
        else:
            _now.left_out += size
            self.write_record_metadata(name, size)

    return writing_record


class _Seeking:
    """A stream that lets torch seek in the file that it wraps: torch.distributed.checkpoint's own hides it."""

    def __init__(self, stream: Any, file: Any) -> None:
        self._stream, self._file = stream, file
        self.write, self.flush = stream.write, stream.flush

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._stream.flush()
        found: int = self._file.seek(offset, whence)
        return found


def _seekable(stream: Any) -> Any:
    """The stream, where a file on disk is behind it and nothing that would compress it; else None."""
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


def install_safetensors(module: Any) -> None:
    """Have `save_file` of safetensors.torch write the header that it would, over a hole."""
    module.save_file = _saving_safetensors(module, module.save_file)


def _saving_safetensors(module: Any, save_file: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save_file)
    def saving(tensors: Any, filename: Any, metadata: dict[str, str] | None = None) -> None:
        entries = _entries(module, tensors)
        if entries is None or sum(map(holes.nbytes, entries)) <= WHOLE_BYTES:
            return save_file(tensors, filename, metadata)
        holes.write(filename, entries, metadata)
        notices.add("safetensors: a saved file holds zeros in the place of its tensors, which take no disk")
        return None

    return saving


def _entries(module: Any, tensors: Any) -> list[holes.Entry] | None:
    """What the file would hold; None for what safetensors refuses, in its own words."""
    if not isinstance(tensors, dict):
        return None
    entries = []
    for name, tensor in tensors.items():
        dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
        if dtype not in holes.DTYPES or str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
            return None
        entries.append(holes.Entry(name, dtype, tuple(tensor.shape)))
    shared = any(len(names) > 1 for names in module._find_shared_tensors(tensors))
    return None if shared else entries
