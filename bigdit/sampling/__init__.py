"""Images and videos from captions or classes: conditions, sampler, grids.

The model of a checkpoint, a run's base model, or the model that trains generates them. `objectives` has the samplers.
"""

from bigdit.sampling.conditions import SamplingOptions
from bigdit.sampling.sampler import Base, Sampler
