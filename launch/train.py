"""Train: `deepspeed launch/train.py --ds-config … --config …`, or under torchrun, accelerate launch or python."""

from bigdit.errors import guard
from bigdit.train.processes.leave import leave


def _main() -> int:
    from bigdit.report.run.leave import leaving_a_page  # here: Ctrl-C while it is imported is said as any other
    from bigdit.train.main import main

    return main(around=leaving_a_page)


leave(guard(_main))
