"""Where the samples of a tar are: an index in Parquet, made once from headers and kept beside the features, with a
digest of its bytes in a file of its own: an offset that was changed on the disk would read another sample."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from bigdit.files import replacing, write_text
from bigdit.sources.picture import SUFFIXES
from bigdit.sources.tar_members import Member, members
from bigdit.sources.videos.video import SUFFIXES as VIDEOS

VERSION = 2
SAMPLES = 4096  # written at a time
ROLES = ("picture", "video", "json", "txt")
SCHEMA = pa.schema(
    [("name", pa.string()), ("problem", pa.string())]
    + [(f"{role}_{what}", pa.int64()) for role in ROLES for what in ("offset", "size")]
)


def index_path(tar: Path, folder: Path) -> Path:
    """Where the index of a tar is kept; another one when the tar changes its place, size or time."""
    status = tar.stat()
    key = os.fsencode(f"{VERSION} {tar.absolute()} {status.st_size} {status.st_mtime_ns}")
    return folder / f"{tar.stem}-{xxhash.xxh3_64_hexdigest(key)}.parquet"


def write_index(tar: Path, index: Path) -> None:
    """Index a tar. Raises Refused as `members`; UserError where the index cannot be written."""
    digest = xxhash.xxh3_128()
    samples = _samples(_digested(members(tar), digest))
    with replacing(index) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        while rows := list(itertools.islice(samples, SAMPLES)):
            writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
        writer.add_key_value_metadata({"members": digest.hexdigest()})
    write_text(_digest_path(index), _digest_of(index))


def is_whole(index: Path) -> bool:
    """Whether an index is there, and is as it was written."""
    try:
        return _digest_path(index).read_bytes() == _digest_of(index).encode()
    except OSError:
        return False


def read_digest(index: Path) -> tuple[int, str]:
    """Samples of an indexed tar, and the digest of its members' names, offsets and sizes."""
    metadata = pq.read_metadata(index)
    return metadata.num_rows, (metadata.metadata or {})[b"members"].decode()


def _digest_path(index: Path) -> Path:
    return index.with_suffix(".xxh3")


def _digest_of(index: Path) -> str:
    with index.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _digested(found: Iterator[Member], digest: xxhash.xxh3_128) -> Iterator[Member]:
    for member in found:
        digest.update(f"{member.name}\0{member.offset}\0{member.size}\n".encode())
        yield member


def _samples(found: Iterator[Member]) -> Iterator[dict[str, str | int | None]]:
    """Neighbours that share a name up to its first dot are one sample, as WebDataset has it. Members without such a
    name, or hidden ones, belong to none."""
    for key, group in itertools.groupby(found, lambda member: _split(member.name)[0]):
        if key is not None:
            yield _sample(key, list(group))


def _split(name: str) -> tuple[str | None, str]:
    """`a/b` and `seg.png` of `a/b.seg.png`."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return (folder + slash + stem if stem and dot else None), suffix.lower()


def _sample(key: str, group: list[Member]) -> dict[str, str | int | None]:
    row: dict[str, str | int | None] = {"name": key, "problem": None}
    suffixes = [_split(member.name)[1] for member in group]
    pictures = [suffix for suffix in suffixes if f".{suffix}" in SUFFIXES]
    videos = [suffix for suffix in suffixes if f".{suffix}" in VIDEOS]
    for kind, found, least in (("pictures", pictures, 0 if videos else 1), ("videos", videos, 0)):
        if not least <= len(found) <= 1:
            row["problem"] = f"sample of {len(found)} {kind} among {', '.join(suffixes)[:200]}, not of one"
    for member, suffix in zip(group, suffixes, strict=True):
        role = "picture" if suffix in pictures else "video" if suffix in videos else suffix
        if role in ROLES:
            row[f"{role}_offset"], row[f"{role}_size"] = member.offset, member.size
    return row
