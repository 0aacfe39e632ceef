"""Images and videos from captions or classes, by a checkpoint or by the model that trains: conditions, sampler, grids.

`objectives` integrates a prediction; `train` decides when a run generates.
"""

from bigdit.sampling.conditions import SamplingOptions
from bigdit.sampling.sampler import Sampler

__all__ = ["Sampler", "SamplingOptions"]
