"""What is known before anything runs: diffusion transformers and the cards to train them on.

The listings are `catalog.models.models()` and `catalog.gpus.gpus()`.
"""

from bigdit.catalog.gpus import Gpu, gpu
from bigdit.catalog.models import FAMILIES, CatalogModel, batch_shape, latent_shape, model

__all__ = ["FAMILIES", "CatalogModel", "Gpu", "batch_shape", "gpu", "latent_shape", "model"]
