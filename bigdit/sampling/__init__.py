"""Pictures from captions or classes, by a checkpoint or by the model that trains: conditions, drawing, grids.

How a prediction is integrated is `objectives`; when a run draws is `train`.
"""

from bigdit.sampling.conditions import SamplingOptions
from bigdit.sampling.sampler import Sampler

__all__ = ["Sampler", "SamplingOptions"]
