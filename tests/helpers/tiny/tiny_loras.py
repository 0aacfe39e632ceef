"""Small transformers that ComfyUI knows, and random adapters for them."""

import json
from pathlib import Path

import torch
from torch import nn

from bigdit import models
from bigdit.strategy import LoraSpec, ModelSpec

TINY = json.loads((Path(__file__).parents[2] / "models/tiny_video.json").read_text())
TINY |= {
    "lumina-2": {
        "class_name": "Lumina2Transformer2DModel",
        "kwargs": {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 1}
        | {"num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 8, "cap_feat_dim": 12}
        | {"axes_dim_rope": [4, 4, 4], "axes_lens": [20, 20, 20]},
    },
    "ovis-image": {
        "class_name": "OvisImageTransformer2DModel",
        "kwargs": {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "num_layers": 1}
        | {"num_single_layers": 1, "joint_attention_dim": 12, "axes_dims_rope": [2, 2, 4]},
    },
    "flux": {
        "class_name": "FluxTransformer2DModel",
        "kwargs": {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "num_layers": 1}
        | {"num_single_layers": 1, "joint_attention_dim": 12, "pooled_projection_dim": 10, "axes_dims_rope": [2, 2, 4]},
    },
}
SPEC = LoraSpec(rank=2, alpha=6.0)  # B·A counts three times


def spec_of(name):
    return ModelSpec(name=name, **{key: TINY[name][key] for key in ("class_name", "kwargs")})


def trained(model, class_name, *, dora, ends=""):
    """Adapters for the linear layers of all blocks, named as a checkpoint names them by peft."""
    blocks = set(models.family(class_name).blocks(model))
    within = tuple(f"{name}." for name, module in model.named_modules() if module in blocks)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith(within) and name.endswith(ends):
            found[f"{name}.lora_A.default.weight"] = torch.randn(SPEC.rank, module.in_features)
            found[f"{name}.lora_B.default.weight"] = torch.randn(module.out_features, SPEC.rank)
            if dora:
                found[f"{name}.lora_magnitude_vector.default.weight"] = 1 + torch.rand(module.out_features)
    return found
