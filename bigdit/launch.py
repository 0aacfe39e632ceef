"""The entry point for launchers: launch/train.py in the repository, else `-m bigdit.launch`."""

from bigdit.errors import guard
from bigdit.train.__main__ import main as train
from bigdit.train.processes.end import leave


def main() -> None:
    """Train, write the run's page, and exit."""
    leave(guard(_main))


def _main() -> int:
    from bigdit.report import leaving_a_page  # here: Ctrl-C during the import is handled too

    return train(around=leaving_a_page)


if __name__ == "__main__":
    main()
