"""Train: `deepspeed launch/train.py --ds-config … --config …`, or under torchrun, accelerate launch or python."""

import sys

from bigdit.errors import guard


def _main() -> int:
    from bigdit.train.main import main  # here: Ctrl-C while it is imported is said as any other

    return main()


sys.exit(guard(_main))
