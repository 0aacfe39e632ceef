"""`python -m bigdit.train`, as the launchers start it."""

from bigdit.errors import guard
from bigdit.train.processes.leave import leave


def _main() -> int:
    from bigdit.train.main import main  # here: Ctrl-C while it is imported is said as any other

    return main()


leave(guard(_main))
