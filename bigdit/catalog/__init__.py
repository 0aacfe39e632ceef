"""Known diffusion transformers, and GPUs to train them on.

The listings are `catalog.models.models()` and `catalog.gpus.gpus()`.
"""

from bigdit.catalog.families import FAMILIES
from bigdit.catalog.gpus import Gpu, gpu
from bigdit.catalog.machine import found_gpus, resolve_gpu
from bigdit.catalog.models import CatalogModel, batch_shape, latent_shape, model
from bigdit.catalog.resolve import find_model, user_model
