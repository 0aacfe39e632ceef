"""`python -m bigdit.train`, as the launchers start it."""

import sys

from bigdit.train.main import main

sys.exit(main())
