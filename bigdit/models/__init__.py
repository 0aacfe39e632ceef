"""Diffusion transformers from diffusers: built from a ModelSpec, driven through one family adapter each."""

from bigdit.models.build import build, load
from bigdit.models.checkpointing import apply_checkpointing
from bigdit.models.family import Family, families, family

__all__ = ["Family", "apply_checkpointing", "build", "families", "family", "load"]
