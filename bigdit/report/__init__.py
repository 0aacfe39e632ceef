"""Terminal output, tables, figures and HTML pages."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigdit import log
from bigdit.config.run import METRICS, PAGE


@contextmanager
def leaving_a_page(output: Path) -> Iterator[None]:
    """Write the page of the run in `output` when the block ends, if its metrics have changed. A failure is logged."""
    before = _written(output)
    try:
        yield
    finally:
        if _written(output) != before:
            # A launcher ends all processes of a run once one has ended. This one must finish the page first.
            handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
            try:
                from bigdit.report.run import read_run, write_page  # here: it imports matplotlib

                log.notice(f"wrote {write_page(read_run(output))}")
            except Exception as error:  # a complete run must not fail because of its page
                log.notice(f"note: {output / PAGE} was not written: {str(error) or type(error).__name__}")
            signal.signal(signal.SIGTERM, handler)


def _written(output: Path) -> tuple[int, int] | None:
    """Time and size of the metrics; None without rows."""
    path = output / METRICS
    found = path.stat() if path.is_file() else None
    return (found.st_mtime_ns, found.st_size) if found and found.st_size else None
