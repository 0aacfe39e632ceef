"""Pieces of a tensor that a block returns: their gradients are joined, and no number changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from stepping import Executed, equipped
from torch import nn

from bigdit import models
from bigdit.loader.batch import Batch
from bigdit.models.equip import join_gradients
from bigdit.strategy import ModelSpec, Strategy

aten = torch.ops.aten
FLUX = ModelSpec(
    name="tiny-flux",
    class_name="FluxTransformer2DModel",
    kwargs={
        **{"num_attention_heads": 2, "attention_head_dim": 8, "axes_dims_rope": [2, 2, 4], "in_channels": 16},
        **{"num_layers": 1, "num_single_layers": 3, "joint_attention_dim": 12, "pooled_projection_dim": 10},
    },
)


def gradients(family, model):
    """The gradient of every parameter, and how often each operator ran."""
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # initial zeros would hide what depends on what
        parameter.data.normal_(std=0.2, generator=draw)
    latents, text = torch.randn(2, 4, 8, 8, generator=draw), torch.randn(2, 6, 12, generator=draw)
    pooled = {"pooled_text": torch.randn(2, 10, generator=draw)}
    batch = Batch(latents, text, torch.ones(2, 6), (1, 2), pooled)
    with Executed() as executed:
        family.predict(model, latents, torch.tensor([0.1, 0.6]), batch).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, executed.counts


@pytest.fixture(scope="module")
def as_slices():
    family = models.family(FLUX.class_name)
    return gradients(family, models.build(FLUX, device="cpu", dtype=torch.float32, seed=0))


@pytest.mark.parametrize(
    "printed",
    [{}, {"checkpointed_blocks": 2}, {"checkpointed_blocks": "all", "checkpointing": "selective"}],
    ids=str,
)
def test_flux_learns_the_same_to_the_bit_and_no_gradient_is_put_into_zeros(printed, as_slices):
    """Three single-stream blocks split what they return. Nothing uses the last one's text."""
    expected, slices = as_slices
    found, joined = gradients(*equipped(Strategy(precision="fp32", **printed), FLUX))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (slices[aten.slice_backward.default], joined[aten.slice_backward.default]) == (5, 0)


def returned(cut):
    """What a block returns that splits twice its input by `cut`, and twice its input."""
    made = []

    class Cuts(nn.Module):
        def forward(self, x):
            made.append(x * 2)
            return cut(made[0])

    block = Cuts()
    join_gradients(block, SimpleNamespace(blocks=lambda model: [model]))
    return block(torch.randn(3, 5, requires_grad=True)), made[0]


@pytest.mark.parametrize(
    ("cut", "sizes"),
    [
        (lambda x: (x[:, :2], x[:, 2:]), (2, 3)),
        (lambda x: (x[:1], x[1:2], x[2:]), (1, 1, 1)),
    ],
    ids=["two", "three"],
)
def test_slices_that_are_all_of_a_tensor_become_a_split_of_it(cut, sizes):
    found, whole = returned(cut)
    assert {piece.grad_fn.name() for piece in found} == {"SplitWithSizesBackward0"}
    assert all(torch.equal(piece, part) for piece, part in zip(found, cut(whole), strict=True))
    weights = [torch.randn(piece.shape) for piece in found]
    (joined,) = torch.autograd.grad(found, whole, weights)
    assert torch.equal(joined, torch.cat(weights, dim=1 if sizes == (2, 3) else 0))


@pytest.mark.parametrize(
    "cut",
    [
        *(lambda x: x[:, :2], lambda x: (x[:, :2],), lambda x: (x[:, :2], None), lambda x: (x[:, 2:], x[:, :2])),
        *(lambda x: (x[:, :3], x[:, 2:]), lambda x: (x[:, :2], x[:, 3:]), lambda x: (x[:, :2], (x + 1)[:, 2:])),
        *(lambda x: (x[:, :2].detach(), x[:, 2:]), lambda x: (x[:, :, None][:, :2], x[:, :, None][:, 2:])),
        lambda x: (x[:, :2], x.transpose(0, 1)[:, :3].transpose(0, 1)[:, 2:]),
    ],
    ids=["a slice", "one", "with none", "turned", "overlap", "gap", "of two", "detached", "of a view", "of views"],
)
def test_whatever_else_is_returned_stays_as_it_is(cut):
    found, whole = returned(cut)
    expected = cut(whole)
    pairs = [(found, expected)] if isinstance(found, torch.Tensor) else list(zip(found, expected, strict=True))
    for piece, same in pairs:
        assert (piece is None) == (same is None)
        assert piece is None or (type(piece.grad_fn) is type(same.grad_fn) and torch.equal(piece, same))
