"""The process that rehearses: `python -m bigdit.rehearse LANE…`, whose forks answer (forks.py).

Processes of their own keep the fake device and all that is patched for it away from the user's, and may leave
without torch's shutdown, which aborts once a python backend is registered.
"""

from __future__ import annotations

import gc
import os
import sys

from bigdit import libraries
from bigdit.errors import guard
from bigdit.rehearse.forks import serve, taken


def main(given: list[str]) -> None:
    """Answer until all lanes are closed."""
    lanes = taken(given)
    gc.disable()  # what is imported stays, and collections would look through all of it time and again
    with libraries.models_alone():
        from bigdit.rehearse.worker import answer, import_for

    serve(lanes, import_for, answer)


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)
