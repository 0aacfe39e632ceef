"""Recording of what torch allocates: by a rehearsal on fake tensors, or by the trainer on a real CPU."""

from bigdit.record.recorder import Recorder
from bigdit.record.watch import Watch

__all__ = ["Recorder", "Watch"]
