"""Images and videos from captions or classes: conditions, sampler, grids.

A checkpoint generates, the model that a run starts from, or the one that trains.
`objectives` integrates a prediction; `train` decides when a run generates.
"""

from bigdit.sampling.conditions import SamplingOptions
from bigdit.sampling.sampler import Base, Sampler

__all__ = ["Base", "Sampler", "SamplingOptions"]
