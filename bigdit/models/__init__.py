"""Diffusion transformers from diffusers: built from a ModelSpec, called through an adapter for each family.

Checkpointing, offload, FP8, compiled blocks and LoRA are added here, alike for all. `catalog` knows of models without
torch.
"""

from bigdit.models.adapters import loaded_by, save_adapters, save_for_comfyui
from bigdit.models.build import build, check_folder, load, outline, skeleton
from bigdit.models.context import split_context
from bigdit.models.equip import adapt, arrange, equip
from bigdit.models.families import families, family
from bigdit.models.family import Conditions, Extra, Family, references, take_through

__all__ = [
    "Conditions",
    "Extra",
    "Family",
    "adapt",
    "arrange",
    "build",
    "check_folder",
    "equip",
    "families",
    "family",
    "load",
    "loaded_by",
    "outline",
    "references",
    "save_adapters",
    "save_for_comfyui",
    "skeleton",
    "split_context",
    "take_through",
]
