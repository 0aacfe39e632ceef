"""The same weights at another resolution, as in a later stage: where each family's positions come from."""

import pytest
import torch

from bigdit import models
from bigdit.models.family import arguments
from bigdit.strategy import ModelSpec

PIXART = {"in_channels": 4, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
PIXART |= {"cross_attention_dim": 16, "caption_channels": 12, "patch_size": 2, "use_additional_conditions": False}
SD3 = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
SD3 |= {"joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 10, "patch_size": 2}


def positions(name, kwargs, side):
    """What is added to the patches of a blank image of `side` patches: [side, side, width]."""
    spec = ModelSpec(name="tiny", class_name=name, kwargs=kwargs)
    model = models.build(spec, device="cpu", dtype=torch.float32, seed=0)
    with torch.no_grad():
        found = model.pos_embed(torch.zeros(1, 4, 2 * side, 2 * side))
    return found.view(side, side, -1) - model.pos_embed.proj.bias


@pytest.mark.parametrize("sample_size", [16, 128])
def test_pixart_interpolates_its_positions_to_any_size(sample_size):
    """Twice as many patches a side have half the distance, also in Σ's model for 1024 pixels (128 latents)."""
    low, high = (positions("PixArtTransformer2DModel", PIXART | {"sample_size": sample_size}, side) for side in (8, 16))
    assert torch.equal(high[::2, ::2], low)
    assert not torch.equal(high[:8, :8], low)


def test_sd3_cuts_its_positions_from_the_middle_of_a_larger_grid():
    low, high = (
        positions("SD3Transformer2DModel", SD3 | {"sample_size": 16, "pos_embed_max_size": 24}, side)
        for side in (8, 16)
    )
    assert torch.equal(high[4:12, 4:12], low)


def test_sana_has_no_positions_of_its_own():
    """The convolutions of its feed-forward layers see where a patch lies, so that any size works."""
    spec = ModelSpec(name="tiny", class_name="SanaTransformer2DModel", kwargs={})
    assert dict(arguments(models.outline(spec)))["interpolation_scale"] is None
