"""What the server imports from which workers are forked: once, however many there are, and without remarks."""

from bigdit import log

log.quiet_libraries()

import bigdit.features.encoders.text  # noqa: E402
import bigdit.features.verify  # noqa: E402
import bigdit.features.worker  # noqa: E402, F401
