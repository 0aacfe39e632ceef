"""CogView3-Plus: one sequence of T5's text and image, conditioned on the picture's size; padded text is attended to.

Source: Zheng et al., arXiv:2403.05121; diffusers' CogView3PlusTransformer2DModel and CogView3PlusPipeline.
"""

from __future__ import annotations

from bigdit.models.families.cogview4 import predict
from bigdit.models.family import Family

FAMILY = Family("CogView3PlusTransformer2DModel", predict)
