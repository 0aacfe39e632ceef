"""One Arrow stream file, as `datasets` saves them, mapped into memory: rows cost what is touched of them.

A mapped file that is cut while it is read ends the process with SIGBUS; the same command then goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import xxhash

from bigdit.files import open_file
from bigdit.sources.columns import Cells

# Of uncompressed files nothing is copied; what decoding allocates is compressed buffers, which could be of any size.
COPIED_BYTES = 2**20
# Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format, the end-of-stream marker
END = b"\xff\xff\xff\xff\0\0\0\0"

# It must outlive all that is allocated from it.
_POOL = pa.proxy_memory_pool(pa.default_memory_pool())


def describe(path: Path) -> tuple[int, pa.Schema, str]:
    """Rows, schema, and the digest of the sizes of batches and file. Raises OSError or ArrowException for what is no
    Arrow stream."""
    size = path.stat().st_size
    with open_file(path) as file:
        file.seek(max(size - len(END), 0))
        if file.read() != END:
            raise pa.ArrowInvalid("the end of its stream is missing: it was cut, or is still written")
    table = _map(path)
    sizes = [batch.num_rows for batch in table.to_batches()]
    return table.num_rows, table.schema, xxhash.xxh3_128_hexdigest(f"{size} {sizes}".encode())


def read(path: Path, start: int, end: int, columns: Sequence[str], batch_rows: int) -> pa.Table:
    """Columns of the rows [start, end)."""
    rows = _mapped(path, path.stat().st_mtime_ns).select(list(columns)).slice(start, end - start)
    rows.validate(full=True)  # offsets stay within their buffers, whoever wrote them
    return rows


@functools.lru_cache(maxsize=8)
def _mapped(path: Path, _changed: int) -> pa.Table:
    return _map(path)


def _map(path: Path) -> pa.Table:
    batches = []
    with pa.ipc.open_stream(pa.memory_map(str(path)), memory_pool=_POOL) as reader:
        for batch in reader:
            if _POOL.bytes_allocated() > COPIED_BYTES:
                raise pa.ArrowInvalid("compressed Arrow files are not read; save_to_disk writes them plain")
            batches.append(batch)
        return pa.Table.from_batches(batches, reader.schema)


def cells_of(schema: pa.Schema) -> dict[str, Cells]:
    """Each column's kind of cells."""
    return {field.name: _cells(field.type) for field in schema}


def _cells(kind: pa.DataType) -> Cells:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_text(kind):
        return "text"
    if _is_list(kind) and _is_text(kind.value_type):
        return "texts"
    if _is_number(kind) or (_is_list(kind) and _is_number(kind.value_type)):
        return "numbers"
    if _is_bytes(kind) or is_image_struct(kind):
        return "picture"
    return "other"


def is_image_struct(kind: pa.DataType) -> bool:
    """Hugging Face's Image: the file's bytes, or null and its path."""
    return pa.types.is_struct(kind) and any(field.name == "bytes" and _is_bytes(field.type) for field in kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
