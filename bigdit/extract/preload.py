"""What the server imports from which workers are forked: once, however many there are, and without remarks."""

from bigdit import libraries

libraries.prepare()

import bigdit.encoders.t5  # noqa: E402
import bigdit.extract.verify  # noqa: E402
import bigdit.extract.worker  # noqa: E402, F401
