"""Train: `deepspeed launch/train.py --ds-config … --config …`, or under torchrun, accelerate launch or python."""

from bigdit.errors import guard
from bigdit.train.processes.leave import leave


def _main() -> int:
    from bigdit.train.main import main  # here: Ctrl-C while it is imported is said as any other

    return main()


leave(guard(_main))
