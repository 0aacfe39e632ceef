"""Diffusion transformers from diffusers: built from a ModelSpec, driven through one family adapter each.

Checkpointing, offload and adapters are put on here, alike for all. What is known of them without torch is `catalog`.
"""

from bigdit.models.adapters import loaded_by, save_adapters, save_for_comfyui
from bigdit.models.build import build, check_folder, load, outline, skeleton
from bigdit.models.conditions import Conditions, Extra
from bigdit.models.equip import adapt, arrange, equip
from bigdit.models.families import families, family
from bigdit.models.family import Family
from bigdit.models.shapes import take_through

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
    "save_adapters",
    "save_for_comfyui",
    "skeleton",
    "take_through",
]
