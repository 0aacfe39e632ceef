"""The paper's DiT: its size, its names, and its output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DiTTransformer2DModel

from bigdit import models
from bigdit.catalog import model
from bigdit.engines import create
from bigdit.loader.batch import Batch
from bigdit.models.families.paper_dit import PaperDiT
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import ModelSpec, Strategy
from bigdit.train.step import train_step

TINY = ModelSpec(
    name="tiny-paper-dit",
    class_name="PaperDiT",
    kwargs={"sample_size": 8, "patch_size": 2, "hidden_size": 16, "depth": 2, "num_heads": 2, "num_classes": 10},
)
PUBLISHED = {
    *("x_embedder.proj.weight", "x_embedder.proj.bias", "pos_embed", "y_embedder.embedding_table.weight"),
    *(f"t_embedder.mlp.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")),
    *(
        f"blocks.{i}.{layer}.{kind}"
        for i in (0, 1)
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
        for kind in ("weight", "bias")
    ),
    *(f"final_layer.{layer}.{kind}" for layer in ("linear", "adaLN_modulation.1") for kind in ("weight", "bias")),
}


def drawn(seed: int = 0) -> PaperDiT:
    """A tiny model with random parameters, also where they begin as zeros. Positions stay."""
    made = models.build(TINY, device="cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for param in made.parameters():
        param.data.normal_(std=0.2, generator=generator)
    assert isinstance(made, PaperDiT)
    return made


PUBLISHED_COUNTS = {
    "DiT-XL/2": (674834720, 675129632),
    "DiT-XL/4": (675000704, 675074432),
    "DiT-XL/8": (675664640, 675683072),
    "DiT-L/2": (457840672, 458102816),
    "DiT-L/4": (457988224, 458053760),
    "DiT-L/8": (458578432, 458594816),
    "DiT-B/2": (130315808, 130512416),
    "DiT-B/4": (130426496, 130475648),
    "DiT-B/8": (130869248, 130881536),
    "DiT-S/2": (32865056, 32963360),
    "DiT-S/4": (32920448, 32945024),
    "DiT-S/8": (33142016, 33148160),
}
"""Parameters that are trained and all, counted in the code of facebookresearch/DiT."""


@pytest.mark.parametrize("published", PUBLISHED_COUNTS)
def test_the_counts_are_those_of_the_paper(published: str) -> None:
    entry = model(f"{published}-paper")
    made = models.build(entry.spec, device="meta", dtype=torch.float32)
    trained, whole = PUBLISHED_COUNTS[published]
    assert entry.params == sum(p.numel() for p in made.parameters()) == trained
    assert entry.params + sum(b.numel() for b in made.buffers()) == whole


def test_the_names_are_published_and_the_first_prediction_is_zero() -> None:
    made = models.build(TINY, device="cpu", dtype=torch.float32, seed=0)
    assert set(made.state_dict()) == PUBLISHED
    assert not made(torch.randn(2, 4, 8, 8), torch.rand(2), torch.tensor([0, 10])).any()


def test_it_computes_what_diffusers_computes() -> None:
    """diffusers' DiT has an embedder a block. With the same weights in each, and the paper's frequencies, it agrees."""
    ours = drawn()
    theirs = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_eps=1e-6,
    ).eval()
    weights, mapped = ours.state_dict(), {}
    for kind in ("weight", "bias"):
        mapped[f"pos_embed.proj.{kind}"] = weights[f"x_embedder.proj.{kind}"]
        mapped[f"proj_out_1.{kind}"] = weights[f"final_layer.adaLN_modulation.1.{kind}"]
        mapped[f"proj_out_2.{kind}"] = weights[f"final_layer.linear.{kind}"]
        for i in (0, 1):
            block, source = f"transformer_blocks.{i}", f"blocks.{i}"
            for projection, part in zip("qkv", weights[f"{source}.attn.qkv.{kind}"].chunk(3), strict=True):
                mapped[f"{block}.attn1.to_{projection}.{kind}"] = part
            mapped[f"{block}.attn1.to_out.0.{kind}"] = weights[f"{source}.attn.proj.{kind}"]
            mapped[f"{block}.ff.net.0.proj.{kind}"] = weights[f"{source}.mlp.fc1.{kind}"]
            mapped[f"{block}.ff.net.2.{kind}"] = weights[f"{source}.mlp.fc2.{kind}"]
            mapped[f"{block}.norm1.linear.{kind}"] = weights[f"{source}.adaLN_modulation.1.{kind}"]
            for n, layer in ((1, 0), (2, 2)):
                embedder = f"{block}.norm1.emb.timestep_embedder.linear_{n}.{kind}"
                mapped[embedder] = weights[f"t_embedder.mlp.{layer}.{kind}"]
    for i in (0, 1):
        table = f"transformer_blocks.{i}.norm1.emb.class_embedder.embedding_table.weight"
        mapped[table] = weights["y_embedder.embedding_table.weight"]
        theirs.transformer_blocks[i].norm1.emb.time_proj.downscale_freq_shift = 0  # the paper divides by 128
    theirs.load_state_dict(mapped)
    latents, t, labels = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 700.0]), torch.tensor([4, 10])
    expected = theirs(latents, timestep=t, class_labels=labels, return_dict=False)[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(latents, t, labels), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.pos_embed, theirs.pos_embed.pos_embed, rtol=0, atol=1e-7)


def test_it_is_saved_and_loaded_as_a_diffusers_folder(tmp_path: Path) -> None:
    made = drawn()
    made.save_pretrained(tmp_path)
    loaded = models.load(TINY, tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, made.state_dict()[name]) for name, p in loaded.state_dict().items())
    assert all(p.requires_grad for p in loaded.parameters())


def test_training_moves_everything_but_the_positions() -> None:
    made = drawn()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    family = models.family("PaperDiT")
    engine = create(Strategy(precision="fp32"), made, family, device=torch.device("cpu"))
    batch = Batch(torch.randn(2, 4, 8, 8), None, None, (0, 1), {"class_label": torch.tensor([1, 10])})
    train_step(engine, family, FlowMatchingSpec(), [batch], lr=1e-2)
    still = [name for name, tensor in made.state_dict().items() if torch.equal(tensor, before[name])]
    assert still == ["pos_embed"]
