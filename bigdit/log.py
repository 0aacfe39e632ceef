"""Output: reports to stdout, progress and notices to stderr, so that `--json` stays clean."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from bigdit.errors import shown

_TRAILING = re.compile("[ \t]+$", re.MULTILINE)


class _Console(Console):
    """Escapes control characters of file names and captions. Pipes and files get no trailing blanks. With NO_COLOR a
    terminal gets no control codes."""

    @property
    def is_dumb_terminal(self) -> bool:
        return self.is_terminal and (bool(os.environ.get("NO_COLOR")) or super().is_dumb_terminal)

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError) if self.stderr else nullcontext():  # a lost notice is no error
            if self.is_terminal:
                super().print(*objects, **options)
                return
            with self.capture() as captured:
                super().print(*objects, **options)
            try:  # not by Console.out, which would be captured too
                self.file.write(_TRAILING.sub("", captured.get()))
                self.file.flush()
            except BrokenPipeError:
                self.on_broken_pipe()

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        return super().render_str(shown(text), *args, **options)


out = _Console()
err = _Console(stderr=True)


def say(text: str) -> None:
    """Print a line of a report on stdout."""
    print(shown(text))


def notice(text: str) -> None:
    """Print a notice on stderr, never wrapped, so that paths can be copied."""
    err.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)


def emit_json(value: Any) -> None:
    """Print a report as JSON on stdout."""
    print(json.dumps(value, indent=2, sort_keys=False, default=str), flush=True)  # before later notices


@contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """Show the current work on stderr; yields the function that changes the text. On a terminal one line changes;
    elsewhere each text is printed once, without a count in parentheses at its end."""
    if err.is_terminal or err.is_jupyter:
        with err.status(what) as shown:
            yield shown.update
        return
    printed = set()

    def update(line: str) -> None:
        stage = line.partition(" (")[0]
        if stage not in printed:
            printed.add(stage)
            notice(stage)

    yield update


class Advance(Protocol):
    """Advances a progress bar by `count`. `skipped` ones do not count in the rate. A `note` replaces the last one."""

    def __call__(self, count: int, note: str = "", skipped: int = 0) -> None: ...


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Advance]:
    """A progress bar on stderr with count, rate, time left and a note; yields the function that advances it.

    Rate and time left are means since the start, because results may come in batches.
    """
    columns = (
        TextColumn(what),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[note]}"),
    )
    began, done, worked = time.monotonic(), 0, 0
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("", total=total, rate="", left="", note="")

        def advance(count: int, note: str = "", skipped: int = 0) -> None:
            nonlocal done, worked
            done, worked = done + count, worked + count - skipped
            bar.update(task, advance=count)
            if note:
                bar.update(task, note=note)
            if done:
                seconds = max(time.monotonic() - began, 1e-3)
                left = timedelta(seconds=round(seconds / done * max(total - done, 0)))
                bar.update(task, rate=f"{worked / seconds:.1f} {unit}/s", left=str(left))

        yield advance
