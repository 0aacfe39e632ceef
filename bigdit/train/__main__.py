"""`python -m bigdit.train`: each process of a run that `bigdit train` starts."""

from bigdit.errors import guard
from bigdit.train.processes.end import leave


def _main() -> int:
    from bigdit.train.main import main  # here: Ctrl-C during the import is handled too

    return main()


leave(guard(_main))
