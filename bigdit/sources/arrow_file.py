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
