"""The process that rehearses: `python -m bigdit.rehearse`; requests come in and answers go out, a line of JSON each.

A process of its own keeps the fake device and all that is patched for it away from the user's, and may leave
without torch's shutdown, which aborts once a python backend is registered.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from bigdit import libraries
from bigdit.errors import guard
from bigdit.lifeline import end_with


def main() -> None:
    """Answer one request after another, until there are no more."""
    end_with(os.getppid(), signal.SIGKILL)
    libraries.prepare()
    gc.disable()  # what is imported stays, and collections would look through all of it time and again
    from bigdit.rehearse.worker import serve

    serve()


if __name__ == "__main__":
    status = guard(main)
    sys.stderr.flush()
    os._exit(status)
