"""Recording of what torch allocates on a GPU, emulated or real, and on its host.

Storages and their ends, by category and phase, become a Timeline, which `memory` sums up.
"""

from bigdit.record.recorder import Recorder, plain
from bigdit.record.watch import Watch

__all__ = ["Recorder", "Watch", "plain"]
