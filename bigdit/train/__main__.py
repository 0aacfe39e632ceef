"""`python -m bigdit.train`: what `bigdit train` starts as each process of a run."""

from bigdit.errors import guard
from bigdit.train.processes.end import leave


def _main() -> int:
    from bigdit.train.main import main  # here, so that Ctrl-C during the import is handled as any other

    return main()


leave(guard(_main))
