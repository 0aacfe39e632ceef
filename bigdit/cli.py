"""The entry point of the command line. `errors.guard` handles all errors after the first import."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing takes milliseconds, in which Ctrl-C would print a traceback
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 the user's error, 2 does not fit, 3 a bug, 130 interrupted."""
    try:
        import signal

        from bigdit.errors import guard  # here: Ctrl-C during the import is handled too
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    status = guard(lambda: _run(sys.argv[1:] if arguments is None else arguments))
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the exit prints no traceback
    sys.exit(status)


def _run(arguments: Sequence[str]) -> int:
    from bigdit.app import run  # here: Ctrl-C during the import is handled too

    return run(arguments)
