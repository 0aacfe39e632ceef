"""Recording of what torch allocates: by a rehearsal on fake tensors, or by the trainer on a real CPU.

Storages and their ends, by category and phase, become a Timeline; what is summed up of it is `memory`.
"""

from bigdit.record.recorder import Recorder, plain
from bigdit.record.watch import Watch

__all__ = ["Recorder", "Watch", "plain"]
