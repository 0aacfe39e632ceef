"""What launchers start: launch/train.py of a checkout, or `-m bigdit.launch` where bigdit was installed."""

from bigdit.errors import guard
from bigdit.train.processes.end import leave


def main() -> None:
    """Train as the command line says, make the run's page, and end the process."""
    leave(guard(_main))


def _main() -> int:
    from bigdit.report import leaving_a_page  # here: Ctrl-C while it is imported is said as any other
    from bigdit.train.main import main as train

    return train(around=leaving_a_page)


if __name__ == "__main__":
    main()
