"""Parts written behind the encoder's back: one thread computes digests, writes and syncs while the next is encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from bigdit.store.part import Encoded, write_part

WAITING_PARTS = 2
"""Parts in memory besides the one that is encoded: one that is being written, and one that the disk is late for."""


class PartWriter:
    """Commits parts in the order in which they are given; the `with` block ends well only when all are on disk.

    `write` returns at once, unless WAITING_PARTS wait already. An error of the disk comes out of the next `write` or
    of the block's end, and what was given after it is not written. On any other error of the block, what waits is
    written all the same: it is whole.
    """

    def __init__(self, *, eight_bits: bool = False) -> None:
        self._eight_bits = eight_bits
        self._thread = ThreadPoolExecutor(1, "writer")
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def write(
        self,
        path: Path,
        encoded: Encoded,
        identity: str,
        scratch: Path | None = None,
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a part of this `part_identity`, by way of `scratch` as in files.replacing; `committed` is called, in
        the writer's thread, when it is on disk. Raises UserError where an earlier one could not be written."""
        self._take_up(WAITING_PARTS - 1)
        self._waiting.append(self._thread.submit(self._commit, path, encoded, identity, scratch, committed))

    def _commit(
        self, path: Path, encoded: Encoded, identity: str, scratch: Path | None, committed: Callable[[], None]
    ) -> None:
        if self._failed:
            return
        try:
            write_part(path, encoded, scratch, identity=identity, eight_bits=self._eight_bits)
            committed()
        except BaseException:
            self._failed = True
            raise

    def _take_up(self, most: int) -> None:
        """Wait until `most` parts wait, and raise what went wrong with one."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0].done()):
            self._waiting.popleft().result()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self._take_up(0)
