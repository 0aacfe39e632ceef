"""The page of a run is made when its training has ended, however that was."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigdit import log
from bigdit.config.run import METRICS, PAGE


@contextmanager
def leaving_a_page(output: Path) -> Iterator[None]:
    """Write the page of the run in `output` when the block ends and rows of its metrics have changed. Whatever fails
    there is a line; nothing of it is imported before."""
    before = _written(output)
    try:
        yield
    finally:
        if _written(output) != before:
            # a launcher ends all processes of a run once one has ended: this one would be ended too early
            handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
            try:
                from bigdit.report.run import read_run, write_page

                log.notice(f"wrote {write_page(read_run(output))}")
            except Exception as error:  # a run that is whole must not fail by its page
                log.notice(f"note: {output / PAGE} is not written: {str(error) or type(error).__name__}")
            signal.signal(signal.SIGTERM, handler)


def _written(output: Path) -> tuple[int, int] | None:
    """When its metrics were written, and their bytes; None where there are no rows."""
    path = output / METRICS
    found = path.stat() if path.is_file() else None
    return (found.st_mtime_ns, found.st_size) if found and found.st_size else None
