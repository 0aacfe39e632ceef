"""`python -m bigdit.train`, as the launchers start it."""

import sys

from bigdit.errors import guard


def _main() -> int:
    from bigdit.train.main import main  # here: Ctrl-C while it is imported is said as any other

    return main()


sys.exit(guard(_main))
