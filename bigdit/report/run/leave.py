"""The page of a run is made when its training has ended, however that was."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigdit import log
from bigdit.config.output import METRICS, PAGE


@contextmanager
def leaving_a_page(output: Path) -> Iterator[None]:
    """Write the page of the run in `output` when the block ends and rows of its metrics have changed. Whatever fails
    there is a line; nothing of it is imported before."""
    before = _written(output)
    try:
        yield
    finally:
        if _written(output) != before:
            with _passing_over_sigterm():
                _write(output)


def _written(output: Path) -> tuple[int, int] | None:
    """When its metrics were written, and their bytes; None where there are no rows."""
    try:
        found = (output / METRICS).stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size) if found.st_size else None


def _write(output: Path) -> None:
    try:
        from bigdit.report.run.found import read_run
        from bigdit.report.run.page import write_page

        log.notice(f"wrote {write_page(read_run(output))}")
    except Exception as error:  # of a run that is whole none may make one that failed
        log.notice(f"note: {output / PAGE} is not written: {str(error) or type(error).__name__}")


@contextmanager
def _passing_over_sigterm() -> Iterator[None]:
    """A launcher ends all processes of a run once one has ended: this one would be ended a second too early."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
