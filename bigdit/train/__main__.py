"""`python -m bigdit.train`, as `bigdit train` starts it, which makes the run's page when it has ended."""

from bigdit.errors import guard
from bigdit.train.processes.end import leave


def _main() -> int:
    from bigdit.train.main import main  # here: Ctrl-C while it is imported is said as any other

    return main()


leave(guard(_main))
