"""Diffusion transformers from diffusers: built from a ModelSpec, called through an adapter for each family.

Checkpointing, offload, FP8, compiled blocks and LoRA are added here in the same way for all families. `catalog`
describes models without torch.
"""

from bigdit.models.build import build, check_folder, load, not_safetensors, outline, read_single_file, skeleton
from bigdit.models.context import split_context
from bigdit.models.equip import adapt, adapt_text, arrange, controlnet, equip
from bigdit.models.families import families, family
from bigdit.models.family import Conditions, Extra, Family, images, take_through
from bigdit.models.lora_files import (
    TEXT_ENCODERS,
    loaded_by,
    of_plain_weights,
    rank_notices,
    read_adapters,
    save_adapters,
    save_for_comfyui,
    start_adapters,
    start_text_adapters,
)
from bigdit.models.whole import Piece, single_file_layout
