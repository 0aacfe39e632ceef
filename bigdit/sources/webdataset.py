"""WebDataset tars: samples are read at their offsets, by an index that is written once.

Nothing is extracted. Python's tarfile reads the headers of the members, within a limit of bytes. It accepts a missing
end, a damaged header in the middle and data after the end, so these are checked here. Links and devices are rejected.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import tarfile
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from PIL import Image

from bigdit import log
from bigdit.config.data import MAX_PIXELS, SourceConfig
from bigdit.errors import UserError
from bigdit.files import IS_LFS_POINTER, is_lfs_pointer, open_file, replacing, write_text
from bigdit.processes import end_with_parent
from bigdit.sources.captions import Label, json_label, read_captions, reads_captions, usual_files
from bigdit.sources.disk import CAPTION_BYTES, IMAGE_BYTES, check_size, opened_range, read_range, sampled_digest
from bigdit.sources.file_rows import read_parquet
from bigdit.sources.image import SUFFIXES
from bigdit.sources.protocol import Caption, Contents, Entry, Item, Unusable, cut
from bigdit.sources.videos import SUFFIXES as VIDEOS
from bigdit.sources.videos import Clip, contents_of, decoded_frames

ROWS = 1024  # rows of an index that are decoded at a time
TARS_A_WORKER = 8  # a process starts in seconds; a tar of ten thousand members takes half a second

MemberSpan = tuple[int, int] | None  # offset and size of a member


@dataclass(frozen=True)
class TarItem(Item):
    """A sample of a tar: the places of its image, video and captions.

    `label`: the key of its class in `.json`. `captioned`: its captions are read. `clip`: the part of a video to read.
    """

    index: int
    name: str
    tar: Path
    problem: str | None
    image: MemberSpan
    json: MemberSpan
    txt: MemberSpan
    label: str | None = None
    captioned: bool = True
    video: MemberSpan = None
    clip: Clip | None = None

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read. With a `clip`, a sample with both image and video gives the video."""
        if self.problem is not None or (self.image is None and (self.video is None or self.clip is None)):
            raise Unusable(self.problem or ("sample of a video, without an image" if self.video else "empty sample"))
        label = None if self.label is None else self._label(self.label)
        captions = self.captions()
        if self.clip is not None and self.video is not None:
            digest = partial(sampled_digest, self.tar, *self.video)
            return Contents(partial(self._frames, self.video, self.clip, max_pixels), digest, captions, label)
        assert self.image is not None
        data = self._read(self.image, "image", IMAGE_BYTES)
        return contents_of(data, self.clip, max_pixels, captions, label)

    def _frames(self, video: tuple[int, int], clip: Clip, max_pixels: int) -> Iterator[Image.Image]:
        with opened_range(self.tar, *video) as file:
            yield from decoded_frames(file, self.name, clip, max_pixels)

    def _label(self, key: str) -> Label:
        name = f"{self.name.rpartition('/')[2]}.json"
        if self.json is None:
            raise Unusable(f"label {name} is missing")
        return json_label(self._read(self.json, name, CAPTION_BYTES), key, name)

    def captions(self) -> tuple[Caption, ...]:
        """As Item.captions."""
        if not self.captioned:
            return ()

        def read(name: str) -> bytes | None:
            span = self.json if name.endswith(".json") else self.txt
            return None if span is None else self._read(span, name, CAPTION_BYTES)

        return read_captions(usual_files(self.name.rpartition("/")[2]), read)

    def _read(self, span: tuple[int, int], name: str, limit: int) -> bytes:
        check_size(name, span[1], limit)
        return read_range(self.tar, *span)


class WebDataset:
    """The samples of tars, in the given order. Their indices are in the folder `cache`."""

    class_names: Collection[str] = ()

    def __init__(
        self,
        tars: Sequence[Path],
        cache: Path,
        workers: int,
        key: str,
        config: SourceConfig,
        clip: Clip | None = None,
    ) -> None:
        """Index new tars in `workers` processes. `clip`: the part of videos to read.

        Raises UserError, which names `key`, for all tars that are rejected, and if there are no samples.
        """
        label = config.label
        self._tars, self._condition, self._clip = list(tars), (label, reads_captions(config)), clip
        try:
            self._indices = [index_path(tar, cache) for tar in self._tars]
        except OSError as error:
            raise UserError(f"{key}: {error.filename} cannot be read: {error.strerror}") from None
        missing = [pair for pair in zip(self._tars, self._indices, strict=True) if not is_whole(pair[1])]
        problems = [
            f"{key}: {problem}; write it again, or leave it out" for problem in _index(missing, workers) if problem
        ]
        if problems:
            raise UserError(*problems)
        digest = xxhash.xxh3_128(b"" if label is None else f"label {label}\n".encode())
        counts = []
        self._entries: list[Entry] = []
        for tar, index in zip(self._tars, self._indices, strict=True):
            count, members = read_digest(index)
            counts.append(count)
            self._entries.append(Entry(tar.name, count, members, "", str(tar.stat().st_mtime_ns)))
            digest.update(f"{tar.name} {members}\n".encode("utf-8", "surrogateescape"))
        self._ends = list(itertools.accumulate(counts))
        if not len(self):
            raise UserError(f"{key}: the tars hold no samples, such as 000.jpg with 000.txt or 000.json")
        self.identity = {"kind": "webdataset", "count": len(self), "digest": digest.hexdigest()}

    def __len__(self) -> int:
        return self._ends[-1]

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return iter(self._entries)

    def items(self, start: int, end: int) -> list[TarItem]:
        """Samples [start, end)."""
        found: list[TarItem] = []
        for number, first, begin, stop in cut(self._ends, start, end):
            rows = read_parquet(self._indices[number], begin, stop, SCHEMA.names, ROWS).to_pylist()
            numbered, tar = enumerate(rows, first + begin), self._tars[number]
            found += [_item(index, tar, row, self._condition, self._clip) for index, row in numbered]
        return found


def _item(index: int, tar: Path, row: dict, condition: tuple[str | None, bool], clip: Clip | None) -> TarItem:
    def span(role: str) -> MemberSpan:
        return None if row[f"{role}_offset"] is None else (row[f"{role}_offset"], row[f"{role}_size"])

    name = f"{tar.name}/{row['name']}"
    image, json, txt, video = map(span, ("image", "json", "txt", "video"))
    return TarItem(index, name, tar, row["problem"], image, json, txt, *condition, video, clip)


def _index(missing: Sequence[tuple[Path, Path]], workers: int) -> Iterator[str | None]:
    """Index tars behind a progress bar. Yields for each why it is rejected, or None."""
    if not missing:
        return
    # In processes, since Python reads the headers. But workers of a pool cannot start processes.
    workers = 1 if multiprocessing.current_process().daemon else min(workers, len(missing) // TARS_A_WORKER)
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(log.progress("index", total=len(missing), unit="tars"))
        problems: Iterator[str | None] = map(_index_one, missing)
        if workers > 1:
            pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent)
            problems = stack.enter_context(pool).map(_index_one, missing)
        for problem in problems:
            advance(1)
            yield problem


def _index_one(pair: tuple[Path, Path]) -> str | None:
    tar, index = pair
    try:
        write_index(tar, index)
    except Rejected as error:
        return f"{tar} {error}"
    return None


VERSION = 5
SAMPLES = 4096  # written at a time
ROLES = ("image", "video", "json", "txt")
SCHEMA = pa.schema(
    [("name", pa.string()), ("problem", pa.string())]
    + [(f"{role}_{what}", pa.int64()) for role in ROLES for what in ("offset", "size")]
)


def index_path(tar: Path, folder: Path) -> Path:
    """The file of a tar's index. Its name changes with the path, size and time of the tar."""
    status = tar.stat()
    key = os.fsencode(f"{VERSION} {tar.absolute()} {status.st_size} {status.st_mtime_ns}")
    return folder / f"{tar.stem}-{xxhash.xxh3_64_hexdigest(key)}.parquet"


def write_index(tar: Path, index: Path) -> None:
    """Index a tar. Raises Rejected as `members`, and UserError if the index cannot be written."""
    digest = xxhash.xxh3_128()
    samples = _samples(_digested(members(tar), digest))
    with replacing(index) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        while rows := list(itertools.islice(samples, SAMPLES)):
            writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
        writer.add_key_value_metadata({"members": digest.hexdigest()})
    write_text(_digest_path(index), _digest_of(index))


def is_whole(index: Path) -> bool:
    """Whether an index is there and undamaged."""
    try:
        return _digest_path(index).read_bytes() == _digest_of(index).encode()
    except OSError:
        return False


def read_digest(index: Path) -> tuple[int, str]:
    """The number of samples of an indexed tar, and the digest of its members' names, offsets and sizes."""
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
    """The samples. As in WebDataset, neighbours with the same name up to the first dot are one, and hidden members and
    those without a dot are ignored."""
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
    images = [suffix for suffix in suffixes if f".{suffix}" in SUFFIXES]
    videos = [suffix for suffix in suffixes if f".{suffix}" in VIDEOS]
    for kind, found, least in (("images", images, 0 if videos else 1), ("videos", videos, 0)):
        if not least <= len(found) <= 1:
            row["problem"] = f"sample of {len(found)} {kind} among {', '.join(suffixes)[:200]}, not of one"
    for member, suffix in zip(group, suffixes, strict=True):
        role = "image" if suffix in images else "video" if suffix in videos else _text_role(suffix, suffixes)
        if role in ROLES:
            row[f"{role}_offset"], row[f"{role}_size"] = member.offset, member.size
    return row


def _text_role(suffix: str, suffixes: Collection[str]) -> str:
    """The role of a member that is no image: that of `txt` for `caption` and `png.txt`, where there is no `txt`."""
    first, _, last = suffix.rpartition(".")
    plain = last if f".{first}" in (*SUFFIXES, *VIDEOS) else suffix
    plain = "txt" if plain == "caption" else plain
    return suffix if plain in suffixes else plain


TAR_BLOCK = tarfile.BLOCKSIZE
HEADER_BYTES = 2**16  # of one member, with its extended headers of long names and attributes
TAIL_BYTES = 2**20  # of zeros after the end: tools fill up a record, mostly of 10 KiB
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class Rejected(Exception):
    """Why a tar is rejected."""


@dataclass(frozen=True)
class Member:
    """A regular file within a tar: its name, and the place of its bytes."""

    name: str
    offset: int
    size: int


def members(path: Path) -> Iterator[Member]:
    """All regular files of the tar, in order.

    Raises Rejected, with the reason, for names that lead out of the tar, links, devices and sparse files, and for cut,
    damaged, compressed and unreadable tars.
    """
    try:
        yield from _members(path)
    except OSError as error:
        raise Rejected(f"cannot be read: {error.strerror}") from None


def _members(path: Path) -> Iterator[Member]:
    with open_file(path) as file:
        headers = _Headers(file.fileno())
        if headers.pread(0, 6).startswith(COMPRESSED):
            raise Rejected("is compressed, so members cannot be read at offsets; decompress it")
        if is_lfs_pointer(headers.pread(0, TAR_BLOCK)):
            raise Rejected(IS_LFS_POINTER)
        if not headers.size:
            raise Rejected("is empty")
        try:
            archive = tarfile.open(fileobj=headers, mode="r:")  # type: ignore[call-overload]  # noqa: SIM115
            while (member := archive.next()) is not None:
                archive.members.clear()  # tarfile keeps them all
                headers.renew()
                if not member.isdir():
                    yield _checked(member, headers.size)
        except (tarfile.TarError, ValueError, ArithmeticError, RecursionError, LookupError) as error:
            raise Rejected(f"is damaged or cut: {error}") from None
        _check_end(headers, archive.offset)


class _Headers:
    """The tar as a file object for headers. A member's headers have at most HEADER_BYTES."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._position = 0
        self.renew()

    def renew(self) -> None:
        """Allow the headers of one more member."""
        self._left = HEADER_BYTES

    def pread(self, offset: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, offset)

    def read(self, count: int) -> bytes:
        self._left -= count
        if count < 0 or self._left < 0:
            raise Rejected(f"has a member whose headers take more than {HEADER_BYTES} bytes")
        data = self.pread(self._position, count)
        self._position += len(data)
        return data

    def seek(self, position: int) -> None:
        self._position = position

    def tell(self) -> int:
        return self._position


def _checked(member: tarfile.TarInfo, size: int) -> Member:
    name = member.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    shown = ascii(name[:100])
    if name.startswith("/") or ".." in name.split("/"):
        raise Rejected(f"has the member {shown}, whose name leads out of it")
    if member.issym() or member.islnk():
        raise Rejected(f"has the member {shown}, a link to {member.linkname[:100]!a}")
    if member.issparse():
        raise Rejected(f"has the member {shown}, a sparse file")
    if not member.isreg():
        raise Rejected(f"has the member {shown}, a device or an unknown type")
    if member.size < 0 or member.offset_data + member.size > size:
        raise Rejected(f"is cut: {shown} of {member.size} bytes goes beyond its end")
    return Member(name.removeprefix("./"), member.offset_data, member.size)


def _check_end(headers: _Headers, end: int) -> None:
    """Check what follows the last member, since tarfile stops at anything that is no header."""
    tail = headers.size - end
    if tail < TAR_BLOCK:
        raise Rejected("is cut: the mark of its end is missing")
    if any(headers.pread(end, TAR_BLOCK)):
        raise Rejected(f"has a damaged header at byte {end}")
    if tail > TAIL_BYTES or any(headers.pread(end, tail)):
        raise Rejected(f"has data after the mark of its end at byte {end}; tars cannot be joined by cat")
