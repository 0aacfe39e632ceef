"""Train: `deepspeed launch/train.py --ds-config … --config …`, or under torchrun, accelerate launch or python."""

import sys

from bigdit.train.main import main

sys.exit(main())
