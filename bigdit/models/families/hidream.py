"""HiDream-I1: dual-stream blocks, then single-stream ones, whose feed-forward is a mixture of experts.

text_embeds are T5's; each block also takes a layer of Llama. In training each token goes through its k experts by
masked indexing, whose sizes depend on values; on an emulated GPU all values are zero.

Source: Cai et al., arXiv:2505.22705; diffusers' HiDreamImageTransformer2DModel and HiDreamImagePipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Extra, Family, arguments, streams

TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B] and text_embeds [B, T, D]. The extras are pooled_text and
    llama_text [B, L T, D'], layer by layer. Padded text is attended to, whatever its masks say."""
    layers = max(arguments(model).llama_layers) + 1
    patches = model(
        hidden_states=latents,
        timesteps=t * TIMESTEP_SCALE,
        encoder_hidden_states_t5=conditions.text_embeds,
        encoder_hidden_states_llama3=conditions.extras["llama_text"].unflatten(1, (layers, -1)).transpose(0, 1),
        pooled_embeds=conditions.extras["pooled_text"],
        return_dict=False,
    )[0]
    return -_images(model, patches, latents)


def extras(model: nn.Module) -> dict[str, Extra]:
    """`pooled_text` of two CLIPs, and `llama_text`: the layers of Llama that feed the blocks."""
    return {"pooled_text": Extra((arguments(model).text_emb_dim,)), **streams(FAMILY.CLASS_NAME, model)}


def _images(model: nn.Module, patches: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """In training the model returns [B, C, patches, p²], with the patches of its largest image if the image is not
    square."""
    if not model.training or arguments(model).force_inference_output:
        return patches
    batch, channels, height, width = latents.shape
    patch = arguments(model).patch_size
    rows, columns = height // patch, width // patch
    grid = patches[:, :, : rows * columns].reshape(batch, channels, rows, columns, patch, patch)
    return grid.permute(0, 1, 2, 4, 3, 5).reshape(batch, channels, height, width)


FAMILY = Family(
    "HiDreamImageTransformer2DModel", predict, lists=("double_stream_blocks", "single_stream_blocks"), extras=extras
)
